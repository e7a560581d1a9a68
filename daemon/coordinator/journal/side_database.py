"""A small SQLite file beside what matters: a history or a projection, without which the program goes on."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""What SQLite says of a file with other tables, and of a damaged one. Other errors, as of a file that is locked or of a
full disk, say nothing against the file."""


class SideDatabase:
    """The file at `path`, whose tables `make_tables` makes if they are missing. A damaged file is set aside, and a new
    one takes its place."""

    def __init__(self, path: Path, make_tables: Callable[[Database], None]) -> None:
        self.path, self._make_tables = path, make_tables

    @contextmanager
    def opened(self) -> Iterator[Database]:
        """The database, in one transaction.

        Raises:
            sqlite3.Error, OSError: the file can't be used.
        """
        try:
            database = self._open()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in _DAMAGED:
                raise
            # A history is worth no operator's time.
            self.path.rename(self.path.with_suffix(".damaged"))
            database = self._open()
        try:
            with database.atomic():
                yield database
        finally:
            database.close()

    def _open(self) -> Database:
        # Nobody else may read it: it says what users run.
        os.close(os.open(self.path, os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = Database(sqlite3.connect(self.path, timeout=1.0))
        self._make_tables(database)
        return database
