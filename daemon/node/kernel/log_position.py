"""How far the errors of the kernel log have been handled: kept over a restart of the node daemon, for this boot.

The position is the kernel's number of the last record whose error was handled, beside the boot's id. Records without an
error need no position: reading them again does no harm. An error is handled when the coordinator has confirmed it, or
when nothing follows from it. The coordinator confirms errors in their order, so a restarted daemon misses no error and
reports none twice. Numbers are those of one boot: a position of another boot counts for nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from muster.daemon.host.lasting_problem import LastingProblem

MAX_FILE_BYTES = 200
"""A boot id has 36 characters, a number of a record at most 20 digits."""
_log = logging.getLogger(__name__)


class LogPosition:
    """The position in `path`; None: nothing is kept. `boot_id`: the file with the id of this boot.

    Raises:
        OSError: `boot_id` can't be read.
    """

    def __init__(self, path: Path | None, boot_id: Path) -> None:
        self._path = path
        self._boot_id = boot_id.read_text().strip() if path else ""
        self._handled = -1
        self._newest = -1
        self._open: dict[int, int] = {}
        self._tokens = itertools.count()
        self._problem = LastingProblem(_log, "the position in the kernel log is kept again")

    def load(self) -> int | None:
        """The number of the last handled record. None: there is none of this boot, or it can't be read."""
        text = self._read()
        boot, _, number = text.partition(" ")
        if not self._path or boot != self._boot_id or not (number.isascii() and number.isdigit()):
            return None
        self._handled = self._newest = int(number)
        return self._handled

    def start_after(self, sequence: int) -> None:
        """Count all records up to this number as handled."""
        self._newest = max(self._newest, sequence)
        self._save()

    def begin(self, sequence: int | None) -> Callable[[], None]:
        """A record with an error is reported. Returns what to call, once or more often, when the error is handled."""
        if sequence is None:
            return _nothing
        token = next(self._tokens)
        self._open[token] = sequence
        self._newest = max(self._newest, sequence)

        def end() -> None:
            if self._open.pop(token, None) is not None:
                self._save()

        return end

    def _read(self) -> str:
        with contextlib.suppress(OSError):
            if self._path:
                with self._path.open("rb") as file:
                    return file.read(MAX_FILE_BYTES).decode(errors="replace").strip()
        return ""

    def _save(self) -> None:
        handled = min(self._open.values()) - 1 if self._open else self._newest
        if handled <= self._handled:
            return
        self._handled = handled
        if self._path:
            try:
                self._write(self._path)
                self._problem.end()
            except OSError as error:
                self._problem.meet(
                    f"the position in the kernel log can't be kept in {error.filename or self._path} "
                    f"({error.strerror}): after a restart, errors that came meanwhile go unseen"
                )

    def _write(self, path: Path) -> None:
        """Replace the file at once. It needs no fsync: the position counts only until the next boot."""
        fresh = path.with_name(f"{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, f"{self._boot_id} {self._handled}\n".encode())
        finally:
            os.close(fd)
        os.replace(fresh, path)


def _nothing() -> None:
    """The record has no number: there is nothing to keep."""
