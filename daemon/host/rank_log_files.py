"""Log files of ranks: one file per rank and generation, in the gang's own folder below the run folder.

All functions block. The zygote and the ranks use them. The agent does not, because shared storage could block it.

Each gang has its own folder: every gang counts generations from 1, and several jobs may share one run folder, also of
several users. A folder of another user in place of the gang's is refused, because links there would lead the logs to
other files of this user. The kernel writes from the rank directly to the file; neither the agent nor srun is in
between.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from muster.daemon.host import own_folder

TAIL_BYTES = 4096
_MIN_FREE_BYTES = 1 << 20


def log_folder(run_dir: str, gang: str) -> Path:
    """The folder with all logs of a gang; `muster logs` reads it."""
    return Path(run_dir, "logs", gang)


def make_log_folder(run_dir: str, gang: str, name: str) -> Path:
    """Create the folder `name` in the gang's log folder, and return it. The run folder must exist.

    Raises:
        OSError: it can't be created, or belongs to another user.
    """
    folder = log_folder(run_dir, gang)
    folder.parent.mkdir(exist_ok=True)
    own_folder.make(folder)
    own_folder.make(folder / name)
    return folder / name


def log_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The log of a rank."""
    return log_folder(run_dir, gang) / f"g{generation}" / f"rank{rank}.log"


def stacks_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The file with the stacks of a rank of a hanging generation."""
    return log_path(run_dir, gang, generation, rank).with_suffix(".stacks")


def open_log(run_dir: str, gang: str, generation: int, rank: int) -> int:
    """Open the log of a rank for appending; return its descriptor.

    Raises:
        OSError: no run folder, no right to write there, or no space; the message says what would be right.
    """
    if not os.path.isdir(run_dir):
        raise OSError(
            errno.ENOENT, f"the run folder {run_dir} does not exist on this node: it must be on shared storage"
        )
    _check_space(Path(run_dir))
    file = log_path(run_dir, gang, generation, rank)
    try:
        make_log_folder(run_dir, gang, file.parent.name)
        _check_space(file.parent)
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        words = error.strerror if error.errno == errno.ENOSPC else f"{file} can't be written: {error.strerror}"
        raise OSError(error.errno, words) from None


def log_tail(run_dir: str, gang: str, generation: int, rank: int) -> str:
    """The last lines (4 kB at most) of a rank's log; empty if there is no log."""
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


def _check_space(folder: Path) -> None:
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"no space is left for logs in {folder}: free some, or set another run_dir")
