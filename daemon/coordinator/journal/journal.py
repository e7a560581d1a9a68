"""The journal: every fact that the core decided. A fact is on disk before the coordinator acts on it.

The journal is one SQLite file in the state folder. `append` writes the facts of one event and their cause in one
transaction, which is on disk when `append` returns. `load` replays: it applies the records after the newest snapshot to
that snapshot, with the same `apply` that the running core uses. Each start raises the term. The events API reads the
same records.

A journal that can't be written or read, or that lacks records, raises JournalError. The coordinator then stops acting.
Each record has a checksum, positions have no gaps, and the end mark (`journal.end`) holds the newest position.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlite_utils import Database

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.state_tables import IllegalTransition
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal import history
from muster.daemon.coordinator.journal.end_mark import EndMark
from muster.daemon.coordinator.journal.history import Record, Registered
from muster.daemon.coordinator.journal.migrations import FORMAT, MIGRATIONS
from muster.daemon.coordinator.journal.per_term_journal import UNSHARED_JOURNAL, Takeover, journal_path, newest_term

SNAPSHOT_EVERY, SNAPSHOT_SHARE = 200, 1.0
"""A snapshot is due after at least this many facts, and only once the facts since the last snapshot take this share of
the last snapshot's bytes. So snapshots cost no more than the facts, and a start reads at most two snapshots' worth."""

_INSERT = "INSERT INTO facts (at, gang, node, name, json, text, cause, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_TAIL = f"SELECT {history.COLUMNS}, crc FROM facts WHERE position > ? ORDER BY position"
_TAIL_BYTES = "SELECT total(length(json)) FROM facts WHERE position > ?"


class JournalError(Exception):
    """The site's fault: the journal can't be written or read. The core must not decide anything without its journal."""


class Journal:
    """The journal in `folder`. The folder is created if it does not exist; this process locks it.

    `lease_term` is the term of the lease, if two machines share the folder; 0: they don't. A shared folder has one
    journal per term (per_term_journal.py says why).

    Raises:
        JournalError: the journal can't be opened, another coordinator uses it, a newer version wrote it, or it is
            damaged.
    """

    def __init__(
        self,
        folder: Path,
        snapshot_every: int = SNAPSHOT_EVERY,
        snapshot_share: float = SNAPSHOT_SHARE,
        *,
        lease_term: int = 0,
    ) -> None:
        self._snapshot_every, self._snapshot_share = snapshot_every, snapshot_share
        self.path = journal_path(folder, lease_term) if lease_term else folder / UNSHARED_JOURNAL
        self._takeover: Takeover | None = None
        with self._wrap_errors("open"), ExitStack() as resources:
            if not lease_term:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (lease_term and newest_term(folder)):
                resources.callback(os.close, _lock(folder / "lock"))
            if lease_term:
                self._takeover = resources.enter_context(Takeover(folder, lease_term))
            self._end_mark = EndMark(self.path.with_suffix(".end"))
            resources.callback(self._end_mark.close)
            # Job specs hold environments: nobody else may read them. SQLite's side files get the mode of this file.
            os.close(os.open(self.path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = Database(sqlite3.connect(self.path, check_same_thread=False))
            resources.callback(self._db.close)
            version = self._read_format()
            self._set_durability(lease_term)
            with self._db.atomic():
                self._migrate(version)
                self.position, self.last_at = self._newest_record()
                self._check_end_mark()
                if version < FORMAT:
                    self._rebuild_snapshot(version)
            newest = self._first_row("SELECT max(position), length(ledger) FROM snapshots")
            self._snapshot_at, self._snapshot_bytes = int(newest[0] or 0), int(newest[1] or 0)
            self._tail_bytes = int(self._first_row(_TAIL_BYTES, self._snapshot_at)[0])
            self.term = self._raise_term(lease_term)
            self._end_mark.write(self.term, self.position)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Close the file. The object can't be used again."""
        self._resources.close()

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """Write the facts `decided` at `at` because of `cause` in one transaction. Returns their records.

        Raises:
            JournalError: none of the facts was written; or all were written, and the end of the commit or the end mark
                failed. The next start finds which.
        """
        records = []
        self._takeover = None  # from now on the copy has records that its source lacks: it must not be removed
        with self._wrap_errors("write"), self._db.atomic():
            for fact in decided:
                gang, node = getattr(fact, "gang", ""), getattr(fact, "node", "")
                row = (float(at), gang, node, *facts.encode(fact), describe(fact), cause)
                position = self._db.execute(_INSERT, (*row, _crc(*row))).lastrowid
                records.append(Record(int(position), *row))
        self.position, self.last_at = records[-1].position, at
        self._tail_bytes += sum(len(record.json) for record in records)
        with self._wrap_errors("write"):
            self._end_mark.write(self.term, self.position)
        return records

    def snapshot_if_due(self, state: DurableState) -> bool:
        """Write `state` as a snapshot if one is due. `state` holds exactly the facts that were appended.

        Raises:
            JournalError: the snapshot can't be written.
        """
        due_bytes = self._snapshot_share * self._snapshot_bytes
        if self.position - self._snapshot_at < self._snapshot_every or self._tail_bytes < due_bytes:
            return False
        text = state.dump()
        with self._wrap_errors("write"), self._db.atomic():
            self._write_snapshot(text)
            # The snapshot before is kept. To repair a damaged newest snapshot, an operator removes its row.
            self._db.execute("DELETE FROM snapshots WHERE position < ?", (self._snapshot_at,))
        self._snapshot_at, self._snapshot_bytes, self._tail_bytes = self.position, len(text), 0
        return True

    def _write_snapshot(self, text: str) -> None:
        row = (self.position, text, _crc(self.position, text))
        self._db.execute("INSERT OR REPLACE INTO snapshots (position, ledger, crc) VALUES (?, ?, ?)", row)

    def load(self, *, use_snapshot: bool = True) -> DurableState:
        """Replay: the newest snapshot and the facts after it (all facts, without `use_snapshot`).

        Completes a takeover: if this journal is a copy, older journals are removed.

        Raises:
            JournalError: a record is damaged or missing. A copy to which nothing was written is closed and removed.
        """
        takeover, self._takeover = self._takeover, None
        try:
            state = self._replay(use_snapshot)
            if takeover:
                with self._wrap_errors("clear the folder of"):
                    takeover.complete()
        except JournalError as error:
            if not takeover:
                raise
            self.close()
            takeover.undo()
            raise JournalError(f"{takeover.source}: {error}") from error
        return state

    def _replay(self, use_snapshot: bool) -> DurableState:
        state, position = DurableState(), 0
        with self._wrap_errors("read"):
            newest = self._first_row("SELECT position, ledger, crc FROM snapshots ORDER BY position DESC LIMIT 1")
            if use_snapshot and newest:
                position, state = int(newest[0]), parse_snapshot(*newest)
            for *row, crc in self._db.execute(_SELECT_TAIL, (position,)):
                position += 1
                replay_record(state, Record(*row), position, crc)
        if position != self.position:
            raise JournalError(f"{self.path} ends at record {self.position}, but its snapshot at record {position}")
        return state

    def history(self, gang: str, after: int, limit: int, most_chars: int | None = None) -> list[Record]:
        """See history.read_page.

        Raises:
            JournalError: the journal can't be read.
        """
        with self._wrap_errors("read"):
            return history.read_page(self._db.conn, gang, after, limit, most_chars)

    def node_history(self, node: str, before: int, limit: int, most_chars: int | None = None) -> list[Record]:
        """See history.read_node_page.

        Raises:
            JournalError: the journal can't be read.
        """
        with self._wrap_errors("read"):
            return history.read_node_page(self._db.conn, node, before, limit, most_chars)

    def find_owner(self, gang: str = "", job: int = 0) -> Registered | None:
        """See history.find_owner.

        Raises:
            JournalError: the journal can't be read.
        """
        with self._wrap_errors("read"):
            return history.find_owner(self._db.conn, gang, job)

    def registration(self, gang: str) -> Record | None:
        """See history.read_registration.

        Raises:
            JournalError: the journal can't be read.
        """
        with self._wrap_errors("read"):
            return history.read_registration(self._db.conn, gang)

    def registered_gangs(self) -> list[str]:
        """Every gang that was ever registered, the newest first.

        Raises:
            JournalError: the journal can't be read.
        """
        with self._wrap_errors("read"):
            return [str(gang) for (gang,) in self._db.execute(history.REGISTERED_GANGS)]

    def _read_format(self) -> int:
        """The format of the file; 0 for a new file."""
        found = self._first_row("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        version = self._meta("schema") if found else 0
        if version > FORMAT:
            raise JournalError(
                f"{self._opened_from} was written by a newer muster (format {version}, this one knows {FORMAT}): "
                "install that version again, or give another --state-dir"
            )
        return version

    def _set_durability(self, lease_term: int) -> None:
        # A write-ahead log needs memory that all users of the file share, which two machines don't. PERSIST zeroes the
        # header of the rollback journal instead of removing the file: a tenth of the time, for the folder stays as is.
        self._db.execute(f"PRAGMA journal_mode = {'PERSIST' if lease_term else 'WAL'}")
        self._db.execute("PRAGMA synchronous = FULL")

    def _migrate(self, version: int) -> None:
        for statement in chain.from_iterable(MIGRATIONS[version:]):
            self._db.execute(statement)
        if version < FORMAT:
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (FORMAT,))
        for index in history.INDEXES:
            self._db.execute(index)

    def _rebuild_snapshot(self, version: int) -> None:
        """Replace the snapshots that an older version wrote by one of this version.

        The older snapshots lack fields of today's durable state. Facts are never removed, so they lack nothing. This
        happens in the migration's transaction: if a fact can't be read, the journal stays as it was, and the older
        version can still use it.
        """
        newest = int(self._first_row("SELECT max(position) FROM snapshots")[0] or 0)
        if newest > self.position:
            raise JournalError(
                f"{self._opened_from} ends at record {self.position}, but its snapshot at record {newest}"
            )
        try:
            state = self._replay(use_snapshot=False)
        except JournalError as error:
            raise JournalError(
                f"{self._opened_from} is left in format {version}, because a record can't be read: {error}"
            ) from error
        self._db.execute("DELETE FROM snapshots")
        if self.position:
            self._write_snapshot(state.dump())

    def _newest_record(self) -> tuple[int, float]:
        """Position and time of the newest record; zeros in an empty journal."""
        row = self._first_row(f"SELECT {history.COLUMNS}, crc FROM facts ORDER BY position DESC LIMIT 1")
        if row is None:
            return 0, 0.0
        record = Record(*row[:-1])
        _verify_checksum(record, row[-1])
        return record.position, record.at

    def _check_end_mark(self) -> None:
        marked_term, marked = self._end_mark.read()
        term = self._meta("term")
        if self.position < marked or term < marked_term:
            coordinators = "both coordinators" if self._takeover else "the coordinator"
            raise JournalError(
                f"{self._opened_from} ends at record {self.position} of term {term}, but record {marked} of term "
                f"{marked_term} was written: newer records are lost. Stop {coordinators}. Then restore the "
                "whole folder from a backup; or cancel the jobs that ran meanwhile, and remove "
                f"{self._opened_from.with_suffix('.end')} to continue from the records that are left"
            )

    @property
    def _opened_from(self) -> Path:
        """The file that errors name while the journal is opened: of a copy, its source."""
        return self._takeover.source if self._takeover else self.path

    def _raise_term(self, least: int) -> int:
        with self._db.atomic():
            self._db.execute("UPDATE meta SET value = max(value + 1, ?) WHERE key = 'term'", (least,))
        return self._meta("term")

    def _meta(self, key: str) -> int:
        row = self._first_row("SELECT value FROM meta WHERE key = ?", key)
        if row is None or not isinstance(row[0], int):
            raise JournalError(f"{self.path} is damaged: it lacks its {key}")
        return row[0]

    def _first_row(self, sql: str, *values: object) -> Any:
        """The first row of the answer; None if the answer is empty."""
        return self._db.execute(sql, values).fetchone()

    @contextmanager
    def _wrap_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"can't {verb} the journal {self.path}: {error}") from error


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise JournalError(
            f"{path.parent} is in use by another coordinator: stop it, or give another --state-dir"
        ) from None
    return handle


def _crc(*values: object) -> int:
    return zlib.crc32("\0".join(map(str, values)).encode())


def parse_snapshot(position: int, text: str, crc: int | None) -> DurableState:
    """The durable state in a snapshot.

    Raises:
        JournalError: the snapshot is damaged.
    """
    if crc not in (None, _crc(position, text)):
        raise JournalError(f"the snapshot at position {position} is damaged: its checksum is wrong")
    try:
        return DurableState.load(text)
    except ValidationError as error:
        raise JournalError(f"the snapshot at position {position} is damaged: {error}") from error


def _verify_checksum(record: Record, crc: int | None) -> None:
    """Raises JournalError if `record` does not match `crc`; None: written before format 2, without a checksum."""
    values = (record.at, record.gang, record.node, record.name, record.json, record.text, record.cause)
    if crc not in (None, _crc(*values)):
        raise JournalError(f"record {record.position} ({record.name}) is damaged: its checksum is wrong")


def replay_record(state: DurableState, record: Record, position: int, crc: int | None) -> None:
    """Apply `record`, which must be the one at `position`, to `state`.

    Raises:
        JournalError: the record is damaged or missing, or no state allows it.
    """
    if record.position != position:
        raise JournalError(f"record {position} is missing; the next one is {record.position}")
    _verify_checksum(record, crc)
    try:
        apply(state, facts.decode(record.name, record.json), record.at)
    except (ValidationError, KeyError, IllegalTransition) as error:
        raise JournalError(f"record {position} ({record.name}) can't be read: {error}") from error
