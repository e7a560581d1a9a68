"""The journal in a folder that two machines share: one file for each term of the lease.

A machine that was cut off from the file server may still hold writes in its cache, and may send them when it is back,
long after the process that made them has died. So a new leader never continues an older term's file: it copies the
newest journal into a file of its own term. Late writes go to a file that no coordinator reads any more.

A copy is provisional until it has been read. If reading fails, the copy is removed, and the next start copies again.
After a successful read all journals are removed except the copy and its source. A power cut after that loses nothing:
the bytes of the copy and its name in the folder are on the disk by then.
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

UNSHARED_JOURNAL = "journal.db"
"""File name of the journal of a coordinator that shares its folder with no other."""
LARGE_BYTES = 1 << 30
"""Bytes from which on the log says how long the copy of a journal took: no coordinator acts during the copy."""

_NAME = re.compile(r"journal-(\d+)\.(db|new|end|db-journal|db-wal|db-shm)")
_SQLITE_SUFFIXES = ("-journal", "-wal")
"""SQLite's own files beside a database whose process was killed."""
_COPY_RANGE_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of copy_file_range that mean: the kernel or the file server can't copy between these two files."""
_log = logging.getLogger(__name__)


def journal_path(folder: Path, term: int) -> Path:
    """The file of the journal of `term`."""
    return folder / f"journal-{term:08d}.db"


def newest_term(folder: Path) -> int:
    """The highest term that has a journal in `folder`; 0 if none has.

    Raises:
        OSError: the folder can't be read.
    """
    return max(_journal_terms(folder), default=0)


class Takeover:
    """Begins the journal of `term` as a copy of the newest journal in `folder`.

    A context manager. After entering, the copy exists, unless there was no journal to copy. Leaving with an exception
    removes the copy.

    Raises:
        OSError: the copy fails, or the folder has a journal of this term or a later one.
    """

    def __init__(self, folder: Path, term: int, fsync: Callable[[int], None] = os.fsync) -> None:
        """`fsync` writes the contents of an open file or folder to the disk."""
        self._folder, self._term, self._fsync = folder, term, fsync
        newest = newest_term(folder)
        if newest >= term:
            raise OSError(f"{journal_path(folder, newest)} exists, but the lease is at term {term}: start again")
        self.source = journal_path(folder, newest) if newest else folder / UNSHARED_JOURNAL
        """The journal to copy, which may not exist."""

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
        """Remove this term's files, as far as the folder permits. No process may have them open."""
        with suppress(OSError):
            _remove(self._folder, lambda term: term == self._term)

    def complete(self) -> None:
        """The copy was read: remove all older journals except its source."""
        kept = max((term for term in _journal_terms(self._folder) if term < self._term), default=0)
        _remove(self._folder, lambda term: term < self._term and term != kept)

    def _copy(self) -> None:
        complete_terms = _journal_terms(self._folder)
        _remove(self._folder, lambda term: term < self._term and term not in complete_terms)
        if not self.source.exists():
            return
        began, size = clock.monotonic(), self.source.stat().st_size
        target = journal_path(self._folder, self._term)
        for ending in _SQLITE_SUFFIXES:
            self._copy_file(Path(f"{self.source}{ending}"), Path(f"{target}{ending}"))
        self._copy_file(self.source.with_suffix(".end"), target.with_suffix(".end"))
        partial = target.with_suffix(".new")
        self._copy_file(self.source, partial)
        partial.rename(target)  # last step: a journal with this name is complete
        self._sync_folder()
        if size >= LARGE_BYTES:
            took = clock.monotonic() - began
            _log.warning(
                "no coordinator acted for %.1f s, while %s (%.1f GB) was copied", took, self.source, size / 1e9
            )

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
        """Write the folder's names to the disk: a copy without its name is lost, and older journals are removed."""
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fsync(handle)
        finally:
            os.close(handle)


def _journal_terms(folder: Path) -> set[int]:
    """The terms that have a complete journal."""
    return {int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)) and found[2] == "db"}


def _remove(folder: Path, which: Callable[[int], bool]) -> None:
    """Remove all files of the terms that `which` selects, the journals first: without them nothing reads the rest."""
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
    """Copy all of `read` to `write`. `copy_range` lets the file server copy without sending the bytes to this machine.

    Raises:
        OSError: `read` can't be read, or `write` can't be written.
    """
    copied_bytes = 0
    try:
        while copied := copy_range(read.fileno(), write.fileno(), LARGE_BYTES):
            copied_bytes += copied
    except OSError as error:
        if error.errno not in _COPY_RANGE_UNSUPPORTED:
            raise
    if copied_bytes:
        read.seek(copied_bytes)
        write.seek(copied_bytes)
    shutil.copyfileobj(read, write, 1 << 20)
