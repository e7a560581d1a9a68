"""Journals of each older format: a replay gives what their facts say, not what their snapshots say.

`golden/journals` holds for each format the whole database of a short run of the simulator, written by the last version
with that format (format 7: by the first version). These files are never
regenerated. In each file the snapshot and the facts after it give another durable state than all the facts do.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import durable_state, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.journal.migrations import FORMAT

GOLDEN = Path(__file__).parent / "golden" / "journals"
OLD = range(1, FORMAT)
IN_USE, STORED_IN_USE = 10, "de70e36632c511d8"
"""The newest format of a version that sites use, and a digest of the fields that it stores. A release renews both."""
LEASES = [pytest.param(0, id="alone"), pytest.param(9, id="shared")]

EXPECTED: dict[int, dict[str, dict[str, object]]] = {
    1: {
        "g1": {"failures_in_a_row": 1, "furthest_step": 12, "first_step_s": 1.4770192425327195},
        "g2": {"first_step_s": 0.9020330783705504},
    },
    2: {"g1": {}, "g2": {"excluded": ("n1",), "first_step_s": 1.892384745455729}},
    3: {
        "g1": {"excluded": ("n0", "n1"), "furthest_step": 1, "first_step_s": 1.676187688886671},
        "g2": {"first_step_s": 1.4431783308698414},
    },
    4: {"g1": {"first_step_s": 1.7914733676446986}, "g2": {"excluded": ("n0", "n2"), "runs_without_start": 1}},
    5: {"g1": {"first_step_s": 1.3077893122195974}},
    6: {"g1": {}, "g2": {}, "g3": {"runs_without_start": 1}},
    7: {
        "g1": {"runs_without_start": 1},
        "g2": {"excluded": ("n0", "n1", "n2", "n5"), "furthest_step": 2, "first_step_s": 1.7473490424581541},
    },
    8: {"g1": {"first_step_s": 1.3831164380450218}, "g2": {"first_step_s": 1.7872388310647693}},
    9: {
        "g1": {
            "excluded": ("n1", "n2"),
            "failures_in_a_row": 2,
            "furthest_step": 4,
            "first_step_s": 1.6783964500943966,
        },
        "g2": {"first_step_s": 1.1725544568712394},
    },
    10: {"g1": {}, "g2": {}, "g3": {"failures_in_a_row": 1, "first_step_s": 1.71610984959716}},
}
"""By format and gang: those of the five values below that are not the default."""


def _place_journal(folder: Path, version: int, lease_term: int) -> Path:
    """Write the journal of that format where a coordinator looks for it."""
    folder.mkdir()
    path = folder / ("journal-00000003.db" if lease_term else "journal.db")
    with closing(sqlite3.connect(path)) as db:
        db.executescript((GOLDEN / f"format-{version}.sql").read_text())
    return path


def _query(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(sql).fetchall()


def _format_and_snapshots(path: Path) -> list[tuple[object, ...]]:
    """What a migration would change."""
    tables = ("meta WHERE key = 'schema'", "snapshots", "sqlite_master")
    return [row for table in tables for row in _query(path, f"SELECT * FROM {table}")]


def _replay_from_snapshot(path: Path) -> DurableState:
    """The durable state from the newest snapshot and the facts after it."""
    with closing(sqlite3.connect(path)) as db:
        position, text = db.execute("SELECT position, ledger FROM snapshots ORDER BY position DESC").fetchone()
        state = DurableState.load(text)
        tail = db.execute(
            "SELECT name, json, at FROM facts WHERE position > ? ORDER BY position", (position,)
        ).fetchall()
    assert tail
    for name, json, at in tail:
        apply(state, facts.decode(name, json), at)
    return state


def _values_of(gang: Gang) -> dict[str, object]:
    return {
        "excluded": gang.slurm.excluded,
        "failures_in_a_row": gang.recovery.failures_in_a_row,
        "runs_without_start": gang.slurm.runs_without_start,
        "furthest_step": gang.recovery.furthest_step,
        "first_step_s": gang.newest.first_step_s,
    }


@pytest.mark.parametrize("lease_term", LEASES)
@pytest.mark.parametrize("version", OLD)
def test_an_older_journal_is_replayed_from_its_facts(tmp_path: Path, version: int, lease_term: int) -> None:
    path = _place_journal(tmp_path / "state", version, lease_term)
    old = _replay_from_snapshot(path)
    with closing(Journal(tmp_path / "state", lease_term=lease_term)) as journal:
        state = journal.load()
        assert state == journal.load(use_snapshot=False) != old
        assert _query(journal.path, "SELECT position FROM snapshots") == [(journal.position,)]
    found = {id: {name: value for name, value in _values_of(gang).items() if value} for id, gang in state.gangs.items()}
    assert found == EXPECTED[version]
    with closing(Journal(tmp_path / "state", lease_term=lease_term + 1 if lease_term else 0)) as again:
        assert again.load() == state


@pytest.mark.parametrize("lease_term", LEASES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "UPDATE facts SET json = '{}' WHERE position = 2",
            r"is left in format 3, .*: record 2 \(NodeReg.* is damaged",
        ),
        ("DELETE FROM facts WHERE position = 2", r"is left in format 3, .*: record 2 is missing; the next one is 3"),
        ("DELETE FROM facts WHERE position > 49", r"ends at record 49, but its snapshot at record 50"),
    ],
)
def test_an_older_journal_that_can_not_be_replayed_stays_unchanged(
    tmp_path: Path, lease_term: int, damage: str, words: str
) -> None:
    """The snapshot hides the damage, so the version that wrote the journal can still use the journal."""
    path = _place_journal(tmp_path / "state", 3, lease_term)
    _query(path, damage)
    before = _format_and_snapshots(path)
    with pytest.raises(JournalError, match=f"^{re.escape(str(path))} {words}"):
        Journal(tmp_path / "state", lease_term=lease_term)
    assert _format_and_snapshots(path) == before
    assert [other.name for other in (tmp_path / "state").glob("*.db")] == [path.name]


def test_an_older_journal_that_lost_newer_records_stays_unchanged(tmp_path: Path) -> None:
    path = _place_journal(tmp_path / "state", 3, 0)
    path.with_suffix(".end").write_text(f"{1:020} {54:020}")
    before = _format_and_snapshots(path)
    with pytest.raises(JournalError, match="newer records are lost"):
        Journal(tmp_path / "state")
    assert _format_and_snapshots(path) == before
    path.with_suffix(".end").unlink()  # as the error says
    with closing(Journal(tmp_path / "state")) as journal:
        assert journal.load() == journal.load(use_snapshot=False)


def test_what_the_journal_stores_changes_only_with_its_format() -> None:
    """A version that does not know a field of a newer one drops it, and writes snapshots that lack it."""
    kinds = [kind for module in (facts, durable_state) for kind in vars(module).values() if isinstance(kind, type)]
    stored = sorted(
        {f"{kind.__name__}: {[field.name for field in fields(kind)]}" for kind in kinds if is_dataclass(kind)}
    )
    digest = hashlib.sha256("\n".join(stored).encode()).hexdigest()[:16]
    assert FORMAT > IN_USE or digest == STORED_IN_USE, (
        "sites use a version that does not know this fact or field: add a format to journal/migrations.py"
    )
