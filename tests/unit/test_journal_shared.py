"""The journal in a folder that two machines share: each term has its own file, and none loses what was written."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.journal import Journal, JournalError

# Writes a fact and is killed in the middle of the next transaction, a part of which is in the file already.
DIES = """
import os, sys
from pathlib import Path
from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.journal import Journal
journal = Journal(Path(sys.argv[1]), lease_term=int(sys.argv[2]))
journal.append([f.NodeRegistered("n1", "boot", "n1:1")], 1.0, "")
db = journal._db
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN")
for n in range(2000):
    db.execute("INSERT INTO facts (at, gang, node, name, json, text, cause) VALUES (2, '', 'x', 'NodeRegistered', ?, '', '')", ["y" * 500])
os._exit(9)
"""  # noqa: E501


def take(folder: Path, term: int, *nodes: str) -> Journal:
    """Take over under `term`, and note that `nodes` have come."""
    journal = Journal(folder, lease_term=term)
    for node in nodes:
        journal.append([f.NodeRegistered(node, "boot", f"{node}:1")], 1.0, "")
    return journal


def names(journal: Journal) -> list[str]:
    return [record.node for record in journal.history("", 0, 100)]


def test_each_term_goes_on_from_the_one_before_in_a_file_of_its_own(tmp_path: Path) -> None:
    for term, node in ((1, "n1"), (2, "n2"), (5, "n3")):
        take(tmp_path, term, node).close()
    with closing(take(tmp_path, 6)) as journal:
        assert names(journal) == ["n1", "n2", "n3"]
        assert set(journal.load().nodes) == {"n1", "n2", "n3"}
        assert journal.term == 6
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["journal-00000005.db", "journal-00000006.db"]


def test_a_journal_of_a_coordinator_without_standby_goes_on(tmp_path: Path) -> None:
    alone = Journal(tmp_path)
    alone.append([f.NodeRegistered("n1", "boot", "n1:1")], 1.0, "")
    assert alone.path.with_name("journal.db-wal").stat().st_size  # as after its death: what it wrote is there alone
    for _ in range(3):
        alone.term = alone._next_term(0)
    with closing(take(tmp_path, 1)) as journal:
        assert names(journal) == ["n1"]
        assert journal.term == alone.term + 1  # more than was ever told
    alone.close()


def test_what_a_killed_process_had_half_written_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path, "1"], timeout=60, check=False)
    assert done.returncode == 9
    left = tmp_path / "journal-00000001.db-journal"
    assert left.stat().st_size
    assert (tmp_path / "journal-00000001.db").stat().st_size > 500_000
    with closing(take(tmp_path, 2, "n2")) as journal:
        assert names(journal) == ["n1", "n2"]
    assert left.exists()  # the old term's files are as they were


def test_what_is_written_late_under_an_older_term_is_read_by_nobody(tmp_path: Path) -> None:
    late = take(tmp_path, 1, "n1")
    journal = take(tmp_path, 2, "n2")
    late.append([f.NodeRegistered("late", "boot", "late:1")], 1.0, "")
    journal.append([f.NodeRegistered("n3", "boot", "n3:1")], 1.0, "")
    journal.close()
    with closing(take(tmp_path, 3)) as journal:
        assert names(journal) == ["n1", "n2", "n3"]
    late.close()


def test_a_copy_that_was_cut_short_counts_for_nothing(tmp_path: Path) -> None:
    take(tmp_path, 1, "n1").close()
    (tmp_path / "journal-00000002.new").write_bytes((tmp_path / "journal-00000001.db").read_bytes()[:5000])
    with closing(take(tmp_path, 3)) as journal:
        assert names(journal) == ["n1"]


def test_a_journal_that_lost_its_end_is_refused_as_ever(tmp_path: Path) -> None:
    take(tmp_path, 1, "n1").close()
    early = (tmp_path / "journal-00000001.db").read_bytes()
    take(tmp_path, 2, "n2").close()
    (tmp_path / "journal-00000002.db").write_bytes(early)
    with pytest.raises(JournalError, match=r"what came after is lost.*remove .*journal-00000003\.end"):
        Journal(tmp_path, lease_term=3)


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    take(tmp_path, 1, "n1").close()
    take(tmp_path, 2).close()
    assert {path.name: oct(os.stat(path).st_mode & 0o777) for path in tmp_path.glob("*.db")} == {
        "journal-00000001.db": "0o600",
        "journal-00000002.db": "0o600",
    }
