"""The store of generations that have ended: a small SQLite file beside the journal, for comparisons with earlier runs.

It is no part of the durable state: the coordinator never decides by it, and works without it. A file that is damaged is
replaced by a new one. The newest `KEPT_OF_NAME` generations of each job name of a user are kept, and `KEPT` in all. Its
methods block, and are called from one thread.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.db import Table

from muster.daemon.coordinator.diagnosis.side_database import SideDatabase

FILE = "past-generations.db"
KEPT_OF_NAME = 100
KEPT = 20_000
"""Rows of some 300 bytes: 6 MB."""
MOST_STEPS = 1 << 53
"""No training has so many. A rank may say any number, and SQLite holds none from 2^63 on."""
_TABLE = "generations"


@dataclass(frozen=True, slots=True)
class PastGeneration:
    """One generation. Times are seconds since the epoch; durations are seconds, 0 if they are not known.

    `settings`: a digest of what makes two runs comparable. `step_s`: the newest median of steps; `best_step_s`: the
    least one, which was noted at `best_at`. `compute_s`, `wait_s`: medians of all ranks.
    """

    gang: str
    generation: int
    job: int
    owner_uid: int
    name: str
    settings: str
    started_at: float
    ended_at: float
    steps: int
    step_s: float
    compute_s: float
    wait_s: float
    best_step_s: float
    best_at: float
    nodes: tuple[str, ...]


class PastGenerations:
    """The store in `folder`. It keeps so many generations of each job name of a user, and so many in all."""

    def __init__(self, folder: Path, kept_of_name: int = KEPT_OF_NAME, kept: int = KEPT) -> None:
        self._database = SideDatabase(folder / FILE, _make_table)
        self._kept_of_name, self._kept = kept_of_name, kept

    def note(self, one: PastGeneration) -> None:
        """Keeps a generation. Of the same generation, the newest note counts, with the best step of all notes.

        Raises:
            SideDatabaseError: the file can't be written.
        """
        with self._database.opened() as database:
            table = database.table(_TABLE)
            before = list(table.rows_where("gang = ? and generation = ?", (one.gang, one.generation)))
            row = {**asdict(one), "nodes": json.dumps(one.nodes), "steps": min(one.steps, MOST_STEPS)}
            if before and 0 < before[0]["best_step_s"] <= one.best_step_s:
                row |= {key: before[0][key] for key in ("best_step_s", "best_at")}
            table.upsert(row, pk=("gang", "generation"))
            self._forget_oldest(table, one)

    def of_job(self, owner_uid: int, name: str) -> list[PastGeneration]:
        """The generations of a user's jobs of that name, the newest first.

        Raises:
            SideDatabaseError: the file can't be read.
        """
        with self._database.opened() as database:
            table = database.table(_TABLE)
            rows = table.rows_where("owner_uid = ? and name = ?", (owner_uid, name), order_by="ended_at desc")
            return [PastGeneration(**{**row, "nodes": tuple(json.loads(row["nodes"]))}) for row in rows]

    def _forget_oldest(self, table: Table, one: PastGeneration) -> None:
        newest = "select rowid from generations {} order by ended_at desc limit ?"
        of_name = newest.format("where owner_uid = ? and name = ?")
        same = (one.owner_uid, one.name)
        table.delete_where(
            f"owner_uid = ? and name = ? and rowid not in ({of_name})", (*same, *same, self._kept_of_name)
        )
        if table.count > self._kept:
            table.delete_where(f"rowid not in ({newest.format('')})", (self._kept,))


def _make_table(database: Database) -> None:
    kinds = {"int": int, "float": float, "str": str, "tuple[str, ...]": str}
    table = database.table(_TABLE).create(
        {field.name: kinds[str(field.type)] for field in fields(PastGeneration)},
        pk=("gang", "generation"),
        if_not_exists=True,
    )
    table.create_index(["owner_uid", "name", "ended_at"], if_not_exists=True)
