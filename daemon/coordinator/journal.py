"""The journal: every fact that the core decided, on disk before anything is done about it.

One SQLite file in the state folder. `append` writes the facts of one event, and what caused them, in one transaction
that is on the disk when it returns. `load` folds the newest snapshot and the tail behind it into a ledger, through the
same `apply` that the running core uses. A term is counted up at each start. The events API reads the same rows.

A journal that can't be written or read raises JournalError; whoever gets one stops acting.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlite_utils import Database

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.ledger import Ledger, apply
from muster.daemon.coordinator.text import describe

SCHEMA = 1
SNAPSHOT_EVERY = 200
"""Facts between two snapshots: some milliseconds of folding at a start."""

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS facts (
    position INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, gang TEXT NOT NULL, node TEXT NOT NULL,
    name TEXT NOT NULL, json TEXT NOT NULL, text TEXT NOT NULL, cause TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS facts_of_gang ON facts (gang, position);
CREATE TABLE IF NOT EXISTS snapshots (position INTEGER PRIMARY KEY, ledger TEXT NOT NULL) STRICT;
"""
_COLUMNS = "position, at, gang, node, name, json, text, cause"
_INSERT = "INSERT INTO facts (at, gang, node, name, json, text, cause) VALUES (?, ?, ?, ?, ?, ?, ?)"
# A gang's history holds the verdicts on its nodes as well.
_HISTORY = f"""
SELECT {_COLUMNS} FROM facts WHERE position > :after AND (:gang = '' OR gang = :gang OR (
    name = 'NodeJudged' AND at >= (SELECT min(at) FROM facts WHERE gang = :gang)
    AND node IN (SELECT node FROM facts WHERE gang = :gang AND name = 'MemberJoined')
)) ORDER BY position LIMIT :limit
"""


class JournalError(Exception):
    """The site's fault: the journal can't be written or read. Nothing may be decided without it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row. `gang` is empty for facts about nodes, `node` for facts that name none; `cause` is the event."""

    position: int
    at: float
    gang: str
    node: str
    name: str
    json: str
    text: str
    cause: str


class Journal:
    """The journal in `folder`, which is made if need be, and held by this process alone.

    Raises:
        JournalError: it can't be opened, another coordinator has it, or a newer version wrote it.
    """

    def __init__(self, folder: Path, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self._snapshot_every = snapshot_every
        self.path = folder / "journal.db"
        with self._guard("open"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _hold(folder / "lock")
            # Specs hold the users' environment: nobody else reads them. SQLite's side files follow this one's mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = Database(sqlite3.connect(self.path, check_same_thread=False))
            self._prepare()
            row = self._one("SELECT max(position), max(at) FROM facts")
            self.position, self.last_at = int(row[0] or 0), float(row[1] or 0.0)
            self._snapshot_at = int(self._one("SELECT max(position) FROM snapshots")[0] or 0)
            self.term = self._next_term()

    def close(self) -> None:
        """Let go of the file; the object is not used again."""
        self._db.close()
        os.close(self._lock)

    def append(self, facts: Sequence[f.Fact], at: float, cause: str) -> list[Record]:
        """Write `facts`, decided at `at` because of `cause`, in one transaction, and return their records.

        Raises:
            JournalError: nothing of it was written.
        """
        records = []
        with self._guard("write"), self._db.atomic():
            for fact in facts:
                row = (at, getattr(fact, "gang", ""), getattr(fact, "node", ""), *f.encode(fact), describe(fact), cause)
                position = self._db.execute(_INSERT, row).lastrowid
                records.append(Record(int(position), *row))
        self.position, self.last_at = records[-1].position, at
        return records

    def snapshot_if_due(self, ledger: Ledger) -> bool:
        """Keep `ledger`, which is the fold of all that was appended, if the tail has grown long.

        Raises:
            JournalError: it can't be written.
        """
        if self.position - self._snapshot_at < self._snapshot_every:
            return False
        with self._guard("write"), self._db.atomic():
            self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (self.position, ledger.dump()))
            # The one before is kept: should the newest be damaged, removing its row is the whole repair.
            self._db.execute("DELETE FROM snapshots WHERE position < ?", (self._snapshot_at,))
        self._snapshot_at = self.position
        return True

    def load(self, *, use_snapshot: bool = True) -> Ledger:
        """The ledger: newest snapshot, and the fold of the facts behind it (of all facts without `use_snapshot`).

        Raises:
            JournalError: a record is damaged.
        """
        ledger, start = Ledger(), 0
        with self._guard("read"):
            newest = self._one("SELECT position, ledger FROM snapshots ORDER BY position DESC LIMIT 1")
            if use_snapshot and newest:
                start, ledger = int(newest[0]), _snapshot(*newest)
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM facts WHERE position > ? ORDER BY position", (start,))
            for row in rows:
                _fold(ledger, Record(*row))
        return ledger

    def history(self, gang: str, after: int, limit: int) -> list[Record]:
        """At most `limit` records behind position `after` that concern `gang` (empty: all), in order.

        Raises:
            JournalError: it can't be read.
        """
        with self._guard("read"):
            rows = self._db.execute(_HISTORY, {"gang": gang, "after": after, "limit": limit})
            return [Record(*row) for row in rows]

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        found = self._one("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        version = int(self._one("SELECT value FROM meta WHERE key = 'schema'")[0]) if found else SCHEMA
        if version > SCHEMA:
            raise JournalError(
                f"{self.path} was written by a newer muster (format {version}, this one knows {SCHEMA}): "
                "install that version again, or give another --state-dir"
            )
        if not found:
            self._db.conn.executescript(_TABLES)
            with self._db.atomic():
                self._db.execute("INSERT INTO meta VALUES ('schema', ?), ('term', 0)", (SCHEMA,))

    def _next_term(self) -> int:
        with self._db.atomic():
            self._db.execute("UPDATE meta SET value = value + 1 WHERE key = 'term'")
        return int(self._one("SELECT value FROM meta WHERE key = 'term'")[0])

    def _one(self, sql: str) -> Any:
        """First row, None where there is none."""
        return self._db.execute(sql).fetchone()

    @contextmanager
    def _guard(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"can't {verb} the journal {self.path}: {error}") from error


def _hold(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise JournalError(
            f"{path.parent} is in use by another coordinator: stop it, or give another --state-dir"
        ) from None
    return handle


def _snapshot(position: int, text: str) -> Ledger:
    try:
        return Ledger.load(text)
    except ValidationError as error:
        raise JournalError(f"the snapshot at position {position} is damaged: {error}") from error


def _fold(ledger: Ledger, record: Record) -> None:
    try:
        apply(ledger, f.decode(record.name, record.json), record.at)
    except (ValidationError, KeyError) as error:
        raise JournalError(f"record {record.position} ({record.name}) can't be read: {error}") from error
