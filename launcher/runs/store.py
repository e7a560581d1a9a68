"""The store of records: one SQLite file in the user's folder. `muster runs` alone opens it, never a job.

What jobs wrote meanwhile, their records and how they went, is taken in when the store is opened. Each method blocks.
The folder may be on shared storage: SQLite keeps no side file of shared memory, and whoever finds the file locked tries
again for a while.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tenacity
from sqlite_utils import Database

from muster.daemon.agent.batch import run_summary
from muster.daemon.agent.training import hardware_file
from muster.daemon.host.held_folder import HeldFolder
from muster.launcher.errors import SiteFault
from muster.launcher.runs.record import NEW, SUFFIX

FILE = "runs.db"
_TABLE = "runs"
_COLUMNS = {"gang_id": str, "slurm_job_id": int, "name": str, "submitted_s": float, "record": str, "outcome": str}
_LOCKED = tenacity.retry_if_exception(
    lambda error: isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `record`: what was known when it was queued. `outcome`: what the job has told last (run_summary); empty:
    nothing yet."""

    record: dict[str, Any]
    outcome: dict[str, Any]

    @property
    def gang(self) -> str:
        """Its gang id."""
        return str(self.record["gang_id"])

    @property
    def is_over(self) -> bool:
        """Its end is known."""
        return bool(self.outcome.get("final"))


class RunStore:
    """The store in `folder`. `left_out`: records that can't be read, each with the reason."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.left_out: dict[str, str] = {}

    def runs(self, told: Mapping[str, dict[str, Any]] | None = None) -> list[Run]:
        """All runs, the newest first, with what is known of them now. `told`: by gang, how runs went as the coordinator
        says, whose word is newer than a file's.

        Raises:
            SiteFault: the store can't be read or written.
        """
        attempts = tenacity.Retrying(
            retry=_LOCKED,
            stop=tenacity.stop_after_delay(10),
            wait=tenacity.wait_random_exponential(0.05, max=1),
            reraise=True,
        )
        try:
            return attempts(self._runs, told or {})
        except (sqlite3.Error, OSError) as error:
            raise SiteFault(
                f"the records of runs in {self._folder} can't be read or written: {error}",
                "name another folder with --store or MUSTER_RUNS",
            ) from None

    def _runs(self, told: Mapping[str, dict[str, Any]]) -> list[Run]:
        if not any((self._folder / name).exists() for name in (FILE, NEW)):
            return []  # to look into a folder makes nothing there
        with self._opened() as database:
            self._take_in_new(database)
            self._take_in_outcomes(database, told)
            rows = database.table(_TABLE).rows_where(order_by="submitted_s desc, slurm_job_id desc")
            return [Run(json.loads(row["record"]), json.loads(row["outcome"])) for row in rows]

    def _take_in_new(self, database: Database) -> None:
        with ExitStack() as stack:
            try:
                new = stack.enter_context(stack.enter_context(HeldFolder.open(self._folder)).own_folder(NEW))
            except FileNotFoundError:
                return
            taken = []
            for name in sorted(name for name in new.names() if name.endswith(SUFFIX)):
                try:
                    with os.fdopen(new.open_file(name), encoding="utf-8") as file:
                        record = json.load(file)
                    row = {key: kind(record[key]) for key, kind in _COLUMNS.items() if key in record}
                except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                    self.left_out[name] = str(error)
                    continue
                database.table(_TABLE).upsert(row | {"record": json.dumps(record), "outcome": "{}"}, pk="gang_id")
                taken.append(name)
            database.conn.commit()  # the files go only once the store has them
            for name in taken:
                new.remove(name)

    def _take_in_outcomes(self, database: Database, told: Mapping[str, dict[str, Any]]) -> None:
        """Of runs whose end is not known yet."""
        table = database.table(_TABLE)
        for row in list(table.rows_where("json_extract(outcome, '$.final') is not 1")):
            gang, run_dir = row["gang_id"], json.loads(row["record"]).get("run_dir", "")
            outcome = told.get(gang) or run_summary.read(run_dir, gang)
            if outcome:
                outcome |= {"hardware": hardware_file.read(run_dir, gang)}
                table.update(gang, {"outcome": json.dumps(outcome)})
        database.conn.commit()

    @contextmanager
    def _opened(self) -> Iterator[Database]:
        path = self._folder / FILE
        with HeldFolder.open_to_pass(self._folder) as folder:
            os.close(folder.append(FILE, 0o600))  # another user's file, or a link, would give the records away
        with closing(sqlite3.connect(path, timeout=5.0)) as connection:
            database = Database(connection)
            database.table(_TABLE).create(_COLUMNS, pk="gang_id", if_not_exists=True)
            yield database
