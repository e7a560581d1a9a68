"""Where ranks write: one file per rank and generation, in the gang's own folder under the run folder. Blocking: used by
the warm process and by ranks, never by the agent, which shared storage may not hang.

Each gang has a folder of its own: generations count from 1 in each, and several jobs, one after the other or at the
same time, may have one run folder.

The kernel writes straight from the rank to the file: neither the agent nor srun stands in between.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

TAIL_BYTES = 4096
_SPARE_BYTES = 1 << 20


def log_folder(run_dir: str, gang: str) -> Path:
    """All logs of a gang; also what `muster logs` reads."""
    return Path(run_dir, "logs", gang)


def log_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The log of a rank."""
    return log_folder(run_dir, gang) / f"g{generation}" / f"rank{rank}.log"


def stacks_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """Where the stacks of a rank are kept when its generation hangs."""
    return log_path(run_dir, gang, generation, rank).with_suffix(".stacks")


def open_log(run_dir: str, gang: str, generation: int, rank: int) -> int:
    """Open (for appending) the log of a rank and return its descriptor.

    Raises:
        OSError: no run folder, no right to write there, or no space; with words that say what would be right.
    """
    if not os.path.isdir(run_dir):
        raise OSError(
            errno.ENOENT, f"the run folder {run_dir} does not exist on this node: it must be on shared storage"
        )
    _must_have_space(Path(run_dir))
    file = log_path(run_dir, gang, generation, rank)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _must_have_space(file.parent)
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        words = error.strerror if error.errno == errno.ENOSPC else f"{file} can't be written: {error.strerror}"
        raise OSError(error.errno, words) from None


def log_tail(run_dir: str, gang: str, generation: int, rank: int) -> str:
    """The last lines (at most 4 kB) of a rank's log; empty where there is none."""
    try:
        with log_path(run_dir, gang, generation, rank).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ""
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2] or data
    return data.decode(errors="replace").strip()


def _must_have_space(folder: Path) -> None:
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"no space is left for logs in {folder}: free some, or set another run_dir")
