"""The journal: every fact that the core decided, on disk before anything is done about it.

One SQLite file in the state folder. `append` writes the facts of one event, and what caused them, in one transaction
that is on the disk when it returns. `load` folds the newest snapshot and the tail behind it into a durable state,
through the same `apply` that the running core uses. A term is counted up at each start. The events API reads the same
rows.

A journal that can't be written or read, or that lacks what was written, raises JournalError; whoever gets one stops
acting. Each row has a checksum, positions have no gaps, and `journal.end` beside the file says how far it had come.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlite_utils import Database

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, apply
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.state_tables import IllegalMove
from muster.daemon.coordinator.journal import per_term_journal as shared
from muster.daemon.coordinator.journal.end_mark import JournalEnd
from muster.daemon.coordinator.journal.migrations import FORMAT, STEPS

SNAPSHOT_EVERY, SNAPSHOT_SHARE = 200, 1.0
"""Facts between two snapshots, at least; there are more where they take less room than this share of the last
snapshot's: so snapshots cost no more than the facts do, and a start reads no more than two snapshots' worth."""

_COLUMNS = "position, at, gang, node, name, json, text, cause"
_INSERT = "INSERT INTO facts (at, gang, node, name, json, text, cause, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_TAIL = f"SELECT {_COLUMNS}, crc FROM facts WHERE position > ? ORDER BY position"
_TAIL_BYTES = "SELECT total(length(json)) FROM facts WHERE position > ?"
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

    `lease_term` is the term of the lease under which a folder is used that other machines see, too (0: none does). The
    journal then is a copy of its own, named after that term (journal_shared.py says why).

    Raises:
        JournalError: it can't be opened, another coordinator has it, a newer version wrote it, or it is damaged.
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
        self.path = shared.path_of(folder, lease_term) if lease_term else folder / shared.ALONE
        self._takeover: shared.Takeover | None = None
        with self._guard("open"), ExitStack() as held:
            if not lease_term:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (lease_term and shared.newest_term(folder)):
                held.callback(os.close, _hold(folder / "lock"))
            if lease_term:
                self._takeover = held.enter_context(shared.Takeover(folder, lease_term))
            self._end = JournalEnd(self.path.with_suffix(".end"))
            held.callback(self._end.close)
            # Specs hold the users' environment: nobody else reads them. SQLite's side files follow this one's mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = Database(sqlite3.connect(self.path, check_same_thread=False))
            held.callback(self._db.close)
            version = self._prepare(lease_term)
            with self._db.atomic():
                self._bring_up(version)
                self.position, self.last_at = self._last()
                self._compare_end()
                if version < FORMAT:
                    self._fold_anew(version)
            newest = self._one("SELECT max(position), length(ledger) FROM snapshots")
            self._snapshot_at, self._snapshot_bytes = int(newest[0] or 0), int(newest[1] or 0)
            self._tail_bytes = int(self._one(_TAIL_BYTES, self._snapshot_at)[0])
            self.term = self._next_term(lease_term)
            self._end.write(self.term, self.position)
            self._held = held.pop_all()

    def close(self) -> None:
        """Let go of the file; the object is not used again."""
        self._held.close()

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """Write `decided`, decided at `at` because of `cause`, in one transaction, and return their records.

        Raises:
            JournalError: nothing of it was written; or all of it, where the commit's own end failed, or the note of it
                in `journal.end`. The next start finds which.
        """
        records = []
        self._takeover = None  # it holds what no other journal does: nothing undoes it any more
        with self._guard("write"), self._db.atomic():
            for fact in decided:
                gang, node = getattr(fact, "gang", ""), getattr(fact, "node", "")
                row = (float(at), gang, node, *facts.encode(fact), describe(fact), cause)
                position = self._db.execute(_INSERT, (*row, _crc(*row))).lastrowid
                records.append(Record(int(position), *row))
        self.position, self.last_at = records[-1].position, at
        self._tail_bytes += sum(len(record.json) for record in records)
        with self._guard("write"):
            self._end.write(self.term, self.position)
        return records

    def snapshot_if_due(self, state: DurableState) -> bool:
        """Keep `state`, which is the fold of all that was appended, if the tail has grown long.

        Raises:
            JournalError: it can't be written.
        """
        due_bytes = self._snapshot_share * self._snapshot_bytes
        if self.position - self._snapshot_at < self._snapshot_every or self._tail_bytes < due_bytes:
            return False
        text = state.dump()
        with self._guard("write"), self._db.atomic():
            self._keep(text)
            # The one before is kept: should the newest be damaged, removing its row is the whole repair.
            self._db.execute("DELETE FROM snapshots WHERE position < ?", (self._snapshot_at,))
        self._snapshot_at, self._snapshot_bytes, self._tail_bytes = self.position, len(text), 0
        return True

    def _keep(self, text: str) -> None:
        row = (self.position, text, _crc(self.position, text))
        self._db.execute("INSERT OR REPLACE INTO snapshots (position, ledger, crc) VALUES (?, ?, ?)", row)

    def load(self, *, use_snapshot: bool = True) -> DurableState:
        """The durable state: newest snapshot, and the fold of the facts behind it (of all facts without
        `use_snapshot`).

        Where the journal is a copy, and nothing was written to it, what was copied is removed or kept by this.

        Raises:
            JournalError: a record is damaged, or one is missing. A copy is closed and gone.
        """
        takeover, self._takeover = self._takeover, None
        try:
            state = self._load(use_snapshot)
            if takeover:
                with self._guard("clear the folder of"):
                    takeover.complete()
        except JournalError as error:
            if not takeover:
                raise
            self.close()
            takeover.undo()
            raise JournalError(f"{takeover.source}: {error}") from error
        return state

    def _load(self, use_snapshot: bool) -> DurableState:
        state, position = DurableState(), 0
        with self._guard("read"):
            newest = self._one("SELECT position, ledger, crc FROM snapshots ORDER BY position DESC LIMIT 1")
            if use_snapshot and newest:
                position, state = int(newest[0]), _snapshot(*newest)
            for *row, crc in self._db.execute(_SELECT_TAIL, (position,)):
                position += 1
                _fold(state, Record(*row), position, crc)
        if position != self.position:
            raise JournalError(f"{self.path} ends at record {self.position}, but its snapshot at record {position}")
        return state

    def history(self, gang: str, after: int, limit: int) -> list[Record]:
        """At most `limit` records behind position `after` that concern `gang` (empty: all), in order.

        Raises:
            JournalError: it can't be read.
        """
        with self._guard("read"):
            rows = self._db.execute(_HISTORY, {"gang": gang, "after": after, "limit": limit})
            return [Record(*row) for row in rows]

    def owner(self, gang: str = "", job: int = 0) -> tuple[str, int] | None:
        """The gang of that id, or the newest of that Slurm job, that was ever registered: its id and its owner's uid.

        Raises:
            JournalError: it can't be read.
        """
        which, value = ("gang = ?", gang) if gang else ("json_extract(json, '$.job') = ?", job)
        with self._guard("read"):
            row = self._one(
                "SELECT gang, json_extract(json, '$.owner_uid') FROM facts "
                f"WHERE name = 'GangRegistered' AND {which} ORDER BY position DESC LIMIT 1",
                value,
            )
        return (str(row[0]), int(row[1])) if row else None

    def _prepare(self, lease_term: int) -> int:
        """The format that it has."""
        found = self._one("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        version = self._meta("schema") if found else 0
        if version > FORMAT:
            raise JournalError(
                f"{self._origin} was written by a newer muster (format {version}, this one knows {FORMAT}): "
                "install that version again, or give another --state-dir"
            )
        # WAL needs memory that all who open the file share: not to be had between machines. A rollback journal that is
        # kept, its header zeroed, costs no change of the folder: a tenth of the time.
        self._db.execute(f"PRAGMA journal_mode = {'PERSIST' if lease_term else 'WAL'}")
        self._db.execute("PRAGMA synchronous = FULL")
        return version

    def _bring_up(self, version: int) -> None:
        for step in STEPS[version:]:
            self._db.executescript(step)
        if version < FORMAT:
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (FORMAT,))

    def _fold_anew(self, version: int) -> None:
        """One snapshot of today's durable state in the place of those that an older version wrote.

        Theirs lack what the durable state came to hold since; the facts don't, and none is ever removed. Not left to
        `load`: where a fact can't be read the journal stays as it was, and that version can still take it up.
        """
        newest = int(self._one("SELECT max(position) FROM snapshots")[0] or 0)
        if newest > self.position:
            raise JournalError(f"{self._origin} ends at record {self.position}, but its snapshot at record {newest}")
        try:
            state = self._load(use_snapshot=False)
        except JournalError as error:
            raise JournalError(
                f"{self._origin} is left in format {version}, for not all can be read: {error}"
            ) from error
        self._db.execute("DELETE FROM snapshots")
        if self.position:
            self._keep(state.dump())

    def _last(self) -> tuple[int, float]:
        """Position and time of the newest record; zeros where there is none."""
        row = self._one(f"SELECT {_COLUMNS}, crc FROM facts ORDER BY position DESC LIMIT 1")
        if row is None:
            return 0, 0.0
        record = Record(*row[:-1])
        _check(record, row[-1])
        return record.position, record.at

    def _compare_end(self) -> None:
        noted_term, noted = self._end.read()
        term = self._meta("term")
        if self.position < noted or term < noted_term:
            whom = "both coordinators" if self._takeover else "the coordinator"
            raise JournalError(
                f"{self._origin} ends at record {self.position} of term {term}, but record {noted} of term "
                f"{noted_term} was written: what came after is lost. Stop {whom}, and cancel the jobs that ran "
                "meanwhile, or bring back the whole folder from before; then remove "
                f"{self._origin.with_suffix('.end')} to go on from what is there"
            )

    @property
    def _origin(self) -> Path:
        """The file that has what is read while it is opened: of a copy, what was copied."""
        return self._takeover.source if self._takeover else self.path

    def _next_term(self, least: int) -> int:
        with self._db.atomic():
            self._db.execute("UPDATE meta SET value = max(value + 1, ?) WHERE key = 'term'", (least,))
        return self._meta("term")

    def _meta(self, key: str) -> int:
        row = self._one("SELECT value FROM meta WHERE key = ?", key)
        if row is None or not isinstance(row[0], int):
            raise JournalError(f"{self.path} is damaged: its {key} is not there")
        return row[0]

    def _one(self, sql: str, *values: object) -> Any:
        """First row, None where there is none."""
        return self._db.execute(sql, values).fetchone()

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


def _crc(*values: object) -> int:
    return zlib.crc32("\0".join(map(str, values)).encode())


def _snapshot(position: int, text: str, crc: int | None) -> DurableState:
    if crc not in (None, _crc(position, text)):
        raise JournalError(f"the snapshot at position {position} is damaged: its checksum is wrong")
    try:
        return DurableState.load(text)
    except ValidationError as error:
        raise JournalError(f"the snapshot at position {position} is damaged: {error}") from error


def _check(record: Record, crc: int | None) -> None:
    """`crc` is None for what was written before format 2."""
    values = (record.at, record.gang, record.node, record.name, record.json, record.text, record.cause)
    if crc not in (None, _crc(*values)):
        raise JournalError(f"record {record.position} ({record.name}) is damaged: its checksum is wrong")


def _fold(state: DurableState, record: Record, position: int, crc: int | None) -> None:
    """Fold `record`, which should be the one at `position`."""
    if record.position != position:
        raise JournalError(f"record {position} is missing; the next one is {record.position}")
    _check(record, crc)
    try:
        apply(state, facts.decode(record.name, record.json), record.at)
    except (ValidationError, KeyError, IllegalMove) as error:
        raise JournalError(f"record {position} ({record.name}) can't be read: {error}") from error
