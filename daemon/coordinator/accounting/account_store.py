"""The store of what gangs have used: a SQLite file beside the journal, with the settled intervals of their ledgers.

It is a projection of the journal, so a file that is damaged is replaced by a new one, and filled again. Its methods
block, and are called from one thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote

from sqlite_utils import Database

from muster.daemon.coordinator.diagnosis.side_database import SideDatabase
from muster.daemon.coordinator.goodput.intervals import TRAINED, Category, Interval, Measured, Wait

FILE = "goodput.db"
KEPT_S = 400 * 86400.0
"""Seconds for which intervals are kept, unless the policy says otherwise: a year, and a month to look back on it."""


@dataclass(frozen=True, slots=True)
class Job:
    """Whose time it is. `account`: of Slurm; empty: not named. `gpus`: of one of its nodes. `complete`: nothing
    follows. `readers`: users and groups that its owner has named, as JSON."""

    gang: str
    job: int
    name: str
    owner_uid: int
    account: str
    gpus: int
    complete: bool = False
    readers: str = "[]"

    def is_shown_to(self, reader: Reader | None) -> bool:
        """`reader` may see what it has used; None: whoever sees all."""
        return reader is None or self.owner_uid == reader.uid or not reader.names.isdisjoint(json.loads(self.readers))


@dataclass(frozen=True, slots=True)
class Reader:
    """A user who sees their own jobs, and those whose owner has named them. `names`: as owners can name them."""

    uid: int
    names: frozenset[str] = frozenset()


@dataclass(slots=True)
class Row:
    """What one group of the account has used: seconds of nodes, and of GPUs, by category.

    `faults`: how many faults its losses are charged with. `saved_node_s`, `saved_gpu_s`: what spares have saved.
    """

    key: str
    node_s: dict[str, float] = field(default_factory=dict)
    gpu_s: dict[str, float] = field(default_factory=dict)
    faults: int = 0
    saved_node_s: float = 0.0
    saved_gpu_s: float = 0.0

    def add(self, category: str, node_s: float, gpus: float) -> None:
        """More time of nodes with so many GPUs each."""
        self.node_s[category] = self.node_s.get(category, 0.0) + node_s
        self.gpu_s[category] = self.gpu_s.get(category, 0.0) + node_s * gpus

    @property
    def lost_gpu_s(self) -> float:
        """Allocated, and not trained."""
        told_apart = (*TRAINED, Category.QUEUE)
        return sum(seconds for category, seconds in self.gpu_s.items() if category not in told_apart)


KEYS = {"job": "j.job || ' ' || j.name", "account": "j.account", "cause": "s.cause", "node": "s.node", "leaf": "s.leaf"}
"""What an account may be grouped by."""
_MEASURED = {name: type(value) for name, value in asdict(Measured()).items()}
_SHOWN = """
(:uid IS NULL OR j.owner_uid = :uid OR EXISTS (SELECT 1 FROM json_each(coalesce(j.readers, '[]')) AS named
    WHERE named.value IN (SELECT value FROM json_each(:names))))
"""
_OF_WINDOW = f"s.until > :since AND s.since < :until AND {_SHOWN}"
_CLIPPED = "s.node_s * (min(s.until, :until) - max(s.since, :since)) / (s.until - s.since)"
_SUMS = """
SELECT {key}, s.category, sum({part}), sum({part} * j.gpus) FROM spans s JOIN jobs j ON j.gang = s.gang
WHERE {window} GROUP BY 1, 2
"""
_FAULTS = """
SELECT key, count(*) FROM (SELECT DISTINCT {key} AS key, s.gang, s.fault_at FROM spans s JOIN jobs j ON j.gang = s.gang
WHERE {window} AND s.cause != '') GROUP BY key
"""
_SAVED = f"""
SELECT {{key}}, total(max(0, r.seconds - w.seconds) * w.nodes), total(max(0, r.seconds - w.seconds) * w.nodes * j.gpus)
FROM waits w JOIN jobs j ON j.gang = w.gang
JOIN (SELECT gang, avg(seconds) AS seconds FROM waits WHERE NOT swap GROUP BY gang) r ON r.gang = w.gang
WHERE w.swap AND w.at > :since AND w.at < :until AND {_SHOWN} GROUP BY 1
"""


class AccountStore:
    """The store in `folder`."""

    def __init__(self, folder: Path, kept_s: float = KEPT_S) -> None:
        """`kept_s`: seconds for which what was used is kept."""
        self._database = SideDatabase(folder / FILE, make_tables)
        self._kept_s = kept_s

    def note(
        self, job: Job, leaves: dict[str, str], intervals: Sequence[Interval], waits: Sequence[Wait], *, anew: bool
    ) -> None:
        """Adds what a gang has used. `leaves`: of its nodes. `anew`: in place of all that is known of it.

        Raises:
            SideDatabaseError: the file can't be written.
        """
        with self._database.opened() as database:
            if anew:
                for table in ("spans", "waits"):
                    database.execute(f"DELETE FROM {table} WHERE gang = ?", (job.gang,))
            database.table("jobs").upsert(asdict(job), pk="gang")
            database.table("spans").insert_all(span_row(job.gang, one, leaves) for one in intervals if one.node_s > 0)
            database.table("waits").insert_all({"gang": job.gang, **asdict(one)} for one in waits)
            if job.complete and intervals:
                _forget(database, intervals[-1].until - self._kept_s)

    def note_measured(self, gang: str, generation: int, measured: Measured) -> None:
        """Keeps what was measured of a generation, for an account that is made again.

        Raises:
            SideDatabaseError: the file can't be written.
        """
        with self._database.opened() as database:
            row = {"gang": gang, "generation": generation, **asdict(measured)}
            database.table("generations").upsert(row, pk=("gang", "generation"))

    def measured(self, gang: str) -> dict[int, Measured]:
        """What was measured of the generations of a gang.

        Raises:
            SideDatabaseError: the file can't be read.
        """
        with self._database.opened() as database:
            return _measured_of(database, gang)

    def account_of(self, gang: str) -> str:
        """The account that was charged last; empty: it is not known.

        Raises:
            SideDatabaseError: the file can't be read.
        """
        with self._database.opened() as database:
            row = database.execute("SELECT account FROM jobs WHERE gang = ?", (gang,)).fetchone()
            return row[0] if row else ""

    def complete(self) -> set[str]:
        """The gangs of which nothing more follows.

        Raises:
            SideDatabaseError: the file can't be read.
        """
        with self._database.opened() as database:
            return {gang for (gang,) in database.execute("SELECT gang FROM jobs WHERE complete")}

    def summary(self, since: float, until: float, by: str, reader: Reader | None) -> dict[str, Row]:
        """What was used between two moments, by one of KEYS. `reader`: who wants to see it; None: whoever sees all.

        Raises:
            SideDatabaseError: the file can't be read.
        """
        rows: dict[str, Row] = {}
        names = json.dumps(sorted(reader.names) if reader else [])
        values = {"since": since, "until": until, "uid": reader.uid if reader else None, "names": names}
        of_job = KEYS[by] if by in ("job", "account") else "''"
        with self._database.opened() as database:
            for key, category, node_s, gpu_s in database.execute(_filled(_SUMS, KEYS[by]), values):
                row = rows.setdefault(key, Row(key))
                row.node_s[category], row.gpu_s[category] = node_s, gpu_s
            for key, faults in database.execute(_filled(_FAULTS, KEYS[by]), values):
                rows.setdefault(key, Row(key)).faults = faults
            for key, node_s, gpu_s in database.execute(_filled(_SAVED, of_job), values):
                row = rows.setdefault(key, Row(key))
                row.saved_node_s, row.saved_gpu_s = node_s, gpu_s
        return rows


def _forget(database: Database, before: float) -> None:
    """Removes what ended before a moment. A job stays in its table: without it, its account would be made again from
    the journal at each start."""
    database.execute("DELETE FROM spans WHERE until < ?", (before,))
    database.execute("DELETE FROM waits WHERE at < ?", (before,))
    of_over = "SELECT gang FROM jobs WHERE complete AND gang NOT IN (SELECT gang FROM spans)"
    database.execute(f"DELETE FROM generations WHERE gang IN ({of_over})")


def read_measured(folder: Path, gang: str) -> dict[int, Measured]:
    """As `AccountStore.measured`, of a store that nothing is written to: for whoever looks at the journal beside it.
    Empty: there is no store, or it can't be read so."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str((folder / FILE).absolute()))}?mode=ro", uri=True)) as database:
            return _measured_of(database, gang)
    except sqlite3.Error:
        return {}


def _measured_of(database: Database | sqlite3.Connection, gang: str) -> dict[int, Measured]:
    rows = database.execute(f"SELECT generation, {', '.join(_MEASURED)} FROM generations WHERE gang = ?", (gang,))
    return {generation: Measured(*values) for generation, *values in rows.fetchall()}


def _filled(query: str, key: str) -> str:
    return query.format(key=key, part=_CLIPPED, window=_OF_WINDOW)


def span_row(gang: str, one: Interval, leaves: dict[str, str]) -> dict[str, object]:
    """An interval of a gang as the table of spans has it."""
    fault = one.fault
    node = fault.node if fault is not None else ""
    return {
        "gang": gang,
        "generation": one.generation,
        "category": one.category.value,
        "cause": fault.kind.value if fault is not None else "",
        "node": node,
        "leaf": leaves.get(node, ""),
        "fault_at": fault.at if fault is not None else 0.0,
        "since": one.since,
        "until": one.until,
        "node_s": one.node_s,
    }


def make_tables(database: Database) -> None:
    """Makes the tables that are missing."""
    columns = asdict(Job("", 0, "", 0, "", 0))
    jobs = database.table("jobs").create(
        {name: type(value) for name, value in columns.items()}, pk="gang", if_not_exists=True
    )
    if "readers" not in jobs.columns_dict:  # the file of an earlier version
        jobs.add_column("readers", str)
    kinds = {"gang": str, "generation": int, "category": str, "cause": str, "node": str, "leaf": str}
    times = dict.fromkeys(("fault_at", "since", "until", "node_s"), float)
    spans = database.table("spans").create(kinds | times, if_not_exists=True)
    spans.create_index(["gang"], if_not_exists=True)
    spans.create_index(["until"], if_not_exists=True)
    waits = {"gang": str, "at": float, "seconds": float, "nodes": int, "swap": int}
    database.table("waits").create(waits, if_not_exists=True).create_index(["gang"], if_not_exists=True)
    measured = {"gang": str, "generation": int, **_MEASURED}
    database.table("generations").create(measured, pk=("gang", "generation"), if_not_exists=True)
