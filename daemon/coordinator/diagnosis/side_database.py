"""A small SQLite file beside the journal: a history or a projection, without which the coordinator goes on.

Its disk may be slow, so a thread reads and writes it. The event loop waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from sqlite_utils import Database

from muster.daemon.host.lasting_problem import LastingProblem

_T = TypeVar("_T")
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""What SQLite says of a file with other tables, and of a damaged one. Other errors, as of a file that is locked or of a
full disk, say nothing against the file."""


class SideDatabaseError(Exception):
    """The site's fault: the file can't be read or written. The message says why."""


class SideDatabase:
    """The file at `path`, whose tables `make_tables` makes if they are missing. A damaged file is set aside, and a new
    one takes its place."""

    def __init__(self, path: Path, make_tables: Callable[[Database], None]) -> None:
        self.path, self._make_tables = path, make_tables

    @contextmanager
    def opened(self) -> Iterator[Database]:
        """The database, in one transaction.

        Raises:
            SideDatabaseError: the file can't be used, or has rows of another form.
        """
        try:
            with closing(self._open_or_replace()) as database, database.atomic():
                yield database
        except (sqlite3.Error, OSError, ValueError, TypeError, KeyError) as error:
            raise SideDatabaseError(f"{self.path}: {error}") from error

    def _open_or_replace(self) -> Database:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in _DAMAGED:
                raise
            # A history is worth no operator's time.
            self.path.rename(self.path.with_suffix(".damaged"))
            return self._open()

    def _open(self) -> Database:
        # Nobody else may read it: it says what users run.
        os.close(os.open(self.path, os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = Database(sqlite3.connect(self.path, timeout=1.0))
        self._make_tables(database)
        return database


class SideThread:
    """The thread that uses one such file."""

    def __init__(self, content: str, log: logging.Logger) -> None:
        """`content`: of the file, in words for people."""
        self._content = content
        self._thread = ThreadPoolExecutor(1, "side-database")
        self._problem = LastingProblem(log, f"{content} can be used again")

    def write(self, write: Callable[[], None]) -> None:
        """Write in the thread, after all that was to be written before."""
        self._thread.submit(self._write, write)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except SideDatabaseError as error:
            self._problem.meet(f"{self._content} can't be written: {error}")
        else:
            self._problem.end()

    async def read(self, read: Callable[[], _T]) -> _T | None:
        """What `read` returns in the thread; None: the file can't be read."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, read)
        except SideDatabaseError as error:
            self._problem.meet(f"{self._content} can't be read: {error}")
            return None
        self._problem.end()
        return found

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()
