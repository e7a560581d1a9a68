"""The journal in a folder that two machines share: a file for each term of the lease.

A machine that was cut off from the folder's server may still hold writes for a file that another has taken over, and
give them to the server when it is back, long after the process that made them has died. So nobody goes on in another's
file: whoever takes a term copies the newest journal, and late writes go to a file that nobody reads any more.

A copy is on trial until it has been read: where that fails nothing of it stays, and the next start copies again. Once
it was read, all but the one before are removed. A power cut after that costs nothing: by then the copy's bytes and its
name in the folder are on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from muster.daemon.host import clock

ALONE = "journal.db"
"""The journal of a coordinator that has its folder to itself."""
LARGE_BYTES = 1 << 30
"""A journal of which it is said how long nobody coordinated while it was copied."""

_NAME = re.compile(r"journal-(\d+)\.(db|new|end|db-journal|db-wal|db-shm)")
_BESIDE = ("-journal", "-wal")
"""Files of SQLite's own that belong to a database whose process was killed."""
_NO_RANGES = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""The two files, or their file systems, can't be copied within the kernel or by the folder's server."""
_log = logging.getLogger(__name__)


def path_of(folder: Path, term: int) -> Path:
    """The journal of a term."""
    return folder / f"journal-{term:08d}.db"


def newest_term(folder: Path) -> int:
    """The highest term of which there is a journal in `folder`; 0: of none.

    Raises:
        OSError: the folder can't be read.
    """
    return max(_whole(folder), default=0)


class Takeover:
    """The journal of `term`, begun as a copy of the newest one in `folder`. Entered: the copy is there, unless there
    was none to copy; left with an error: it is gone again.

    Raises:
        OSError: it can't be copied, or the folder has a journal of this term or a later one.
    """

    def __init__(self, folder: Path, term: int, fsync: Callable[[int], None] = os.fsync) -> None:
        """`fsync` writes what an open file or folder holds to the disk."""
        self._folder, self._term, self._fsync = folder, term, fsync
        newest = newest_term(folder)
        if newest >= term:
            raise OSError(f"{path_of(folder, newest)} is there, no older than term {term} of the lease: start again")
        self.source = path_of(folder, newest) if newest else folder / ALONE
        """What is copied, if it is there."""

    def __enter__(self) -> Self:
        try:
            self._copy()
        except BaseException:
            self.undo()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind:
            self.undo()

    def undo(self) -> None:
        """Remove what there is of this term, as far as the folder lets us; nobody may have it open."""
        with suppress(OSError):
            _remove(self._folder, lambda term: term == self._term)

    def complete(self) -> None:
        """It was read: remove all older ones but that which was copied."""
        kept = max((term for term in _whole(self._folder) if term < self._term), default=0)
        _remove(self._folder, lambda term: term < self._term and term != kept)

    def _copy(self) -> None:
        whole = _whole(self._folder)
        _remove(self._folder, lambda term: term < self._term and term not in whole)
        if not self.source.exists():
            return
        began, size = clock.monotonic(), self.source.stat().st_size
        target = path_of(self._folder, self._term)
        for ending in _BESIDE:
            self._copy_file(Path(f"{self.source}{ending}"), Path(f"{target}{ending}"))
        self._copy_file(self.source.with_suffix(".end"), target.with_suffix(".end"))
        aside = target.with_suffix(".new")
        self._copy_file(self.source, aside)
        aside.rename(target)  # last: a journal with this name is whole
        self._sync_folder()
        if size >= LARGE_BYTES:
            took = clock.monotonic() - began
            _log.warning("nobody coordinated for %.1f s: %s, %.1f GB, was copied", took, self.source, size / 1e9)

    def _copy_file(self, source: Path, target: Path) -> None:
        try:
            read = source.open("rb")
        except FileNotFoundError:
            return
        with read, open(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as write:
            copy_bytes(read, write)
            write.flush()
            self._fsync(write.fileno())

    def _sync_folder(self) -> None:
        """Write the names in the folder to the disk: without its name the copy is lost, and older ones are removed."""
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fsync(handle)
        finally:
            os.close(handle)


def _whole(folder: Path) -> set[int]:
    """The terms of which there is a journal."""
    return {int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)) and found[2] == "db"}


def _remove(folder: Path, which: Callable[[int], bool]) -> None:
    """Remove all files of these terms, the journal itself first: without it the others count for nothing."""
    found = [
        (match[2] != "db", path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and which(int(match[1]))
    ]
    for _, path in sorted(found):
        path.unlink(missing_ok=True)


def copy_bytes(
    read: BinaryIO, write: BinaryIO, copy_range: Callable[[int, int, int], int] = os.copy_file_range
) -> None:
    """Copy all of `read`; by `copy_range` as far as it goes, so that a folder's server need not send and receive it.

    Raises:
        OSError: it can't be read or written.
    """
    done = 0
    try:
        while copied := copy_range(read.fileno(), write.fileno(), LARGE_BYTES):
            done += copied
    except OSError as error:
        if error.errno not in _NO_RANGES:
            raise
    if done:
        read.seek(done)
        write.seek(done)
    shutil.copyfileobj(read, write, 1 << 20)
