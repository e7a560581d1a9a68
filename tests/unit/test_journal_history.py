"""What a page of the events API costs: it grows with what it returns, not with the journal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.journal import history
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services.watching import HISTORY_PAGE_CHARS, HISTORY_PAGE_RECORDS
from muster.node_health import NodeHealth

NODES = tuple(f"n{number}" for number in range(8))
SPEC = GangSpec(nodes=8, spares=0, min_nodes=8)


def _write(folder: Path, strangers: int) -> Path:
    """A journal of two jobs, with `strangers` facts of other nodes and of another gang. Returns its file."""
    with closing(Journal(folder)) as journal:
        journal.append([facts.GangRegistered("g", 1, 1000, "train", SPEC, "{}")], 1.0, "")
        journal.append([facts.MemberJoined("g", node, 1, "i", f"{node}:1", False, "") for node in NODES], 1.0, "")
        journal.append([facts.GangRegistered("h", 2, 1001, "other", SPEC, "{}")], 2.0, "")
        for number in range(strangers):
            journal.append(
                [
                    facts.NodeJudged(f"m{number % 50}", NodeHealth.DEGRADED, "Xid 92"),
                    facts.NodeRegistered(f"m{number % 50}", f"boot{number}", "10.0.0.1:7071"),
                    facts.FirstStep("h", 1, number),
                ],
                3.0 + number,
                "",
            )
        journal.append([facts.NodeJudged("n1", NodeHealth.LOST, "silent")], 1e6, "")
        return journal.path


def _work(path: Path, sql: str, values: object) -> int:
    """How many hundreds of instructions of SQLite's machine the statement takes."""
    count = 0

    def note() -> int:
        nonlocal count
        count += 1
        return 0

    with closing(sqlite3.connect(path)) as database:
        database.set_progress_handler(note, 100)
        assert database.execute(sql, values).fetchall()  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        (history.OF_GANG, {"gang": "g", "after": 0, "limit": 500}),
        (history.OF_GANG, {"gang": "g", "after": 12, "limit": 500}),
        (history.OF_ALL, {"after": 0, "limit": 10}),
        (history.OF_NODE, {"node": "n1", "before": 1 << 62, "limit": 500}),
        (history.OWNER_OF_GANG, ("h",)),
        (history.OWNER_OF_JOB, (2,)),
    ],
)
def test_a_page_costs_the_same_in_a_journal_ten_times_as_long(tmp_path: Path, sql: str, values: object) -> None:
    """The attack: the owner of a small job asks for its events again and again."""
    short, long = _write(tmp_path / "short", 30), _write(tmp_path / "long", 300)
    assert _work(long, sql, values) <= _work(short, sql, values) + 1


def test_large_records_make_short_pages_and_none_is_lost(tmp_path: Path) -> None:
    """The attack: a job whose records are as large as its owner can make them."""
    with closing(Journal(tmp_path)) as journal:
        reason = "x" * 4000
        for number in range(300):
            journal.append([facts.NodeJudged("n1", NodeHealth.DEGRADED, f"{number} {reason}")], float(number), reason)
        pages, after = [], 0
        while page := journal.history("", after, HISTORY_PAGE_RECORDS, HISTORY_PAGE_CHARS):
            pages.append(page)
            after = page[-1].position
    assert max(sum(len(r.json) + len(r.text) + len(r.cause) for r in page) for page in pages) <= HISTORY_PAGE_CHARS
    assert [record.position for page in pages for record in page] == list(range(1, 301))


def test_a_record_larger_than_a_page_is_a_page(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append([facts.NodeJudged("n1", NodeHealth.LOST, "x" * 1000)] * 2, 1.0, "")
        assert [len(journal.history("", after, 10, 100)) for after in (0, 1, 2)] == [1, 1, 0]


def test_an_older_journal_gets_the_indexes(tmp_path: Path) -> None:
    path = _write(tmp_path, 3)
    with closing(sqlite3.connect(path)) as database:
        for name in ("registrations_of_gang", "nodes_of_gang", "verdicts_of_node", "records_of_node"):
            database.execute(f"DROP INDEX {name}")
        database.commit()
    with closing(Journal(tmp_path)) as journal:
        names = [record.name for record in journal.history("g", 0, 100)]
        of_node = [record.name for record in journal.node_history("n1", 1 << 62, 100)]
    assert names == ["GangRegistered", *["MemberJoined"] * 8, "NodeJudged"]
    assert of_node == ["NodeJudged", "MemberJoined"]
