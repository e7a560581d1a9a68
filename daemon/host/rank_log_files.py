"""Log files of ranks: one file per rank and generation, in the gang's own folder below the run folder.

All functions block. The zygote and the ranks use them. The agent does not, because shared storage could block it.

Each gang has its own folder: every gang counts generations from 1, and several jobs may share one run folder, also of
several users. Others may own or write the run folder and the folder `logs` in it. The gang's folder is this user's, and
is held open while a file in it is opened (held_folder.py): a folder of another user in its place, and a link in place
of any of these, is refused. The kernel writes from the rank directly to the file; neither the agent nor srun is in
between.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from muster.daemon.host.held_folder import HeldFolder

TAIL_BYTES = 4096
AGENTS, _OF_JOB = "agents", "job-"
"""The folder of the agents' logs beside those of the ranks. An empty file in it names each Slurm job of the gang."""
_MIN_FREE_BYTES = 1 << 20
_LOGS = "logs"
_GENERATION, _LOG = re.compile(r"g(\d+)"), re.compile(r"rank(\d+)\.log")
_SHARED_MODE = 0o777
"""Of the folder of all logs. The user's umask takes away from it."""


def log_folder(run_dir: str, gang: str) -> Path:
    """The folder with all logs of a gang; `muster logs` reads it."""
    return Path(run_dir, _LOGS, gang)


def gangs_with_logs(run_dir: str) -> list[str]:
    """The gangs that have logs in a run folder, the newest first; none: there are none, or they can't be read."""
    try:
        folders = [(entry.stat().st_mtime, entry.name) for entry in Path(run_dir, _LOGS).iterdir() if entry.is_dir()]
    except OSError:
        return []
    return [name for _, name in sorted(folders, reverse=True)]


def is_of_job(run_dir: str, gang: str, job: str) -> bool:
    """Whether agents of this Slurm job have written logs of the gang."""
    return os.path.lexists(log_folder(run_dir, gang) / AGENTS / f"{_OF_JOB}{job}")


def note_job(agents: HeldFolder, job: str) -> None:
    """Note in the folder of the agents' logs that a Slurm job is of this gang. A local run has none.

    Raises:
        OSError: the note can't be written.
    """
    if job:
        os.close(agents.append(f"{_OF_JOB}{job}"))


def hold_log_folder(run_dir: str, gang: str, name: str) -> HeldFolder:
    """Create the folder `name` in the gang's log folder, and hold it open. The run folder must exist.

    Raises:
        OSError: it can't be created, or belongs to another user, or is a link.
    """
    with HeldFolder.open_to_pass(run_dir) as run_folder:
        run_folder.make_folder(_LOGS, _SHARED_MODE)
        with run_folder.folder(_LOGS) as logs, logs.make_own_folder(gang) as own:
            return own.make_own_folder(name)


def log_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The log of a rank."""
    return log_folder(run_dir, gang) / f"g{generation}" / f"rank{rank}.log"


def newest_logs(run_dir: str, gang: str, first: int) -> dict[tuple[int, int], Path]:
    """The logs of ranks from generation `first` on, by generation and rank, as far as they can be read."""
    found: dict[tuple[int, int], Path] = {}
    with suppress(OSError):
        for folder in log_folder(run_dir, gang).iterdir():
            match = _GENERATION.fullmatch(folder.name)
            if match and int(match[1]) >= first:
                numbers = (_LOG.fullmatch(file.name) for file in folder.iterdir())
                found |= {(int(match[1]), int(name[1])): folder / name[0] for name in numbers if name}
    return found


def stacks_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The file with the stacks of a rank of a hanging generation."""
    return log_path(run_dir, gang, generation, rank).with_suffix(".stacks")


def error_path(run_dir: str, gang: str, generation: int, rank: int) -> Path:
    """The file in which a rank may write its error down (torch's TORCHELASTIC_ERROR_FILE)."""
    return log_path(run_dir, gang, generation, rank).with_suffix(".error.json")


def open_log(run_dir: str, gang: str, generation: int, rank: int) -> int:
    """Open the log of a rank for appending; return its descriptor.

    Raises:
        OSError: no run folder, no right to write there, or no space; the message says what would be right.
    """
    if not os.path.isdir(run_dir):
        raise OSError(
            errno.ENOENT, f"the run folder {run_dir} does not exist on this node: it must be on shared storage"
        )
    _check_space(run_dir)
    file = log_path(run_dir, gang, generation, rank)
    try:
        with hold_log_folder(run_dir, gang, file.parent.name) as folder:
            _check_space(folder.descriptor, file.parent)
            return folder.append(file.name)
    except OSError as error:
        words = error.strerror if error.errno == errno.ENOSPC else f"{file} can't be written: {_describe(error, file)}"
        raise OSError(error.errno, words) from None


def log_tail(run_dir: str, gang: str, generation: int, rank: int) -> str:
    """The last lines (4 kB at most) of a rank's log; empty if there is no log."""
    file = log_path(run_dir, gang, generation, rank)
    try:
        with open_to_read(file) as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - TAIL_BYTES))
            data = log.read(TAIL_BYTES)
    except OSError:
        return ""
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2] or data
    return data.decode(errors="replace").strip()


def note_failed(run_dir: str, gang: str, generation: int, rank: int, code: int) -> None:
    """Note beside the log of a rank that the rank has failed, and its exit code: `remove_old` keeps that log."""
    file = log_path(run_dir, gang, generation, rank).with_suffix(".failed")
    try:
        with (
            hold_log_folder(run_dir, gang, file.parent.name) as folder,
            os.fdopen(folder.append(file.name), "w") as note,
        ):
            note.write(str(code))
    except OSError:
        pass  # then its log counts as any other one


def failed_codes(run_dir: str, gang: str) -> list[int]:
    """The exit codes of ranks that have failed in the newest generation; of a signal: minus its number."""
    logs = newest_logs(run_dir, gang, 0)
    newest = max((generation for generation, _ in logs), default=0)
    codes = []
    for (generation, _), log in logs.items():
        with suppress(OSError, ValueError):
            if generation == newest:
                with open_to_read(log.with_suffix(".failed")) as note:
                    codes.append(int(note.read(16)))
    return codes


def remove_old(run_dir: str, gang: str, running: int, most_bytes: int) -> tuple[int, int]:
    """Remove logs of old generations, the oldest first, until the gang's logs take no more than `most_bytes`. The two
    newest generations up to `running` are kept, and so are ranks that have failed, and stacks.

    Returns the bytes that are left, and how many logs were removed.

    Raises:
        OSError: the folders can't be read or written.
    """
    removed, left, found = 0, 0, []
    with HeldFolder.open_to_pass(run_dir) as run_folder, run_folder.folder(_LOGS) as logs, logs.own_folder(gang) as own:
        numbers = sorted(int(match[1]) for name in own.names() if (match := _GENERATION.fullmatch(name)))
        for number in numbers:
            with own.own_folder(f"g{number}") as folder:
                sizes = {name: status.st_size for name, status in folder.statuses()}
            left += sum(sizes.values())
            failed = {name.removesuffix(".failed") for name in sizes if name.endswith(".failed")}
            old = {name: size for name, size in sizes.items() if _LOG.fullmatch(name) and name[:-4] not in failed}
            found += [(number, old)] if number < running - 1 else []
        for number, old in found:
            if left <= most_bytes:
                break
            with own.own_folder(f"g{number}") as folder:
                for name, size in old.items():
                    folder.remove(name)
                    left, removed = left - size, removed + 1
    return left, removed


def open_to_read(file: Path) -> BinaryIO:
    """Open a log or a file of stacks for whoever looks at it. A link, a named pipe or a device is refused.

    Raises:
        OSError: it can't be read.
    """
    with HeldFolder.open_to_pass(file.parent) as folder:
        return os.fdopen(folder.open_file(file.name), "rb")


def _describe(error: OSError, file: Path) -> str:
    """What is wrong, and with which folder above `file`."""
    return f"{error.filename}: {error.strerror}" if error.filename not in (None, str(file)) else str(error.strerror)


def _check_space(folder: str | int, path: Path | None = None) -> None:
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _MIN_FREE_BYTES:
        where = path or folder
        raise OSError(errno.ENOSPC, f"no space is left for logs in {where}: free some, or set another run_dir")
