"""The journal in a folder that two machines share: each term has its own file, and no term loses records."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.journal.per_term_journal import Takeover, copy_bytes

# Writes a fact and ends in the middle of the next transaction. A part of that transaction is in the file already.
DIES = """
import os, sys
from pathlib import Path
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal
journal = Journal(Path(sys.argv[1]), lease_term=int(sys.argv[2]))
journal.append([facts.NodeRegistered("n1", "boot", "n1:1")], 1.0, "")
db = journal._db
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN")
for n in range(2000):
    db.execute("INSERT INTO facts (at, gang, node, name, json, text, cause) VALUES (2, '', 'x', 'NodeRegistered', ?, '', '')", ["y" * 500])
os._exit(9)
"""  # noqa: E501


def take_over(folder: Path, term: int, *nodes: str) -> Journal:
    """Take over under `term` and register `nodes`."""
    journal = Journal(folder, lease_term=term)
    for node in nodes:
        journal.append([facts.NodeRegistered(node, "boot", f"{node}:1")], 1.0, "")
    return journal


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def spoil(folder: Path, term: int) -> None:
    """Damage a record of this term's journal."""
    with closing(sqlite3.connect(folder / f"journal-{term:08d}.db")) as db, db:
        db.execute("UPDATE facts SET json = replace(json, 'n1', 'nX') WHERE position = 1")


def names(journal: Journal) -> list[str]:
    return [record.node for record in journal.history("", 0, 100)]


def test_each_term_continues_the_journal_in_its_own_file(tmp_path: Path) -> None:
    for term, node in ((1, "n1"), (2, "n2"), (5, "n3")):
        take_over(tmp_path, term, node).close()
    with closing(take_over(tmp_path, 6)) as journal:
        assert names(journal) == ["n1", "n2", "n3"]
        assert set(journal.load().nodes) == {"n1", "n2", "n3"}
        assert journal.term == 6
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["journal-00000005.db", "journal-00000006.db"]


def test_the_journal_of_a_coordinator_without_a_standby_is_continued(tmp_path: Path) -> None:
    alone, left = Journal(tmp_path / "alone"), tmp_path / "left behind"
    alone.append([facts.NodeRegistered("n1", "boot", "n1:1")], 1.0, "")
    for _ in range(3):
        alone.term = alone._raise_term(0)
    shutil.copytree(alone.path.parent, left)
    alone.close()
    assert (left / "journal.db-wal").stat().st_size  # as after its death: the records are in this file alone
    with closing(take_over(left, 1)) as journal:
        assert names(journal) == ["n1"]
        assert journal.term == alone.term + 1  # above every term that an agent has seen


def test_a_transaction_that_a_killed_process_left_half_written_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path, "1"], timeout=60, check=False)
    assert done.returncode == 9
    left = tmp_path / "journal-00000001.db-journal"
    assert left.stat().st_size
    assert (tmp_path / "journal-00000001.db").stat().st_size > 500_000
    with closing(take_over(tmp_path, 2, "n2")) as journal:
        assert names(journal) == ["n1", "n2"]
    assert left.exists()  # the old term's files are unchanged


def test_a_late_write_under_an_older_term_is_never_read(tmp_path: Path) -> None:
    late = take_over(tmp_path, 1, "n1")
    journal = take_over(tmp_path, 2, "n2")
    late.append([facts.NodeRegistered("late", "boot", "late:1")], 1.0, "")
    journal.append([facts.NodeRegistered("n3", "boot", "n3:1")], 1.0, "")
    journal.close()
    with closing(take_over(tmp_path, 3)) as journal:
        assert names(journal) == ["n1", "n2", "n3"]
    late.close()


def test_an_incomplete_copy_is_ignored(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    (tmp_path / "journal-00000002.new").write_bytes((tmp_path / "journal-00000001.db").read_bytes()[:5000])
    with closing(take_over(tmp_path, 3)) as journal:
        assert names(journal) == ["n1"]


def test_a_journal_that_lost_newer_records_is_an_error_that_names_it(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    early = (tmp_path / "journal-00000001.db").read_bytes()
    take_over(tmp_path, 2, "n2").close()
    (tmp_path / "journal-00000002.db").write_bytes(early)
    before = files(tmp_path)
    for term in (3, 4):
        with pytest.raises(JournalError, match=r"newer records are lost\. Stop both.*remove .*journal-00000002\.end"):
            Journal(tmp_path, lease_term=term)
        assert files(tmp_path) == before
    (tmp_path / "journal-00000002.end").unlink()
    with closing(take_over(tmp_path, 5)) as journal:
        assert names(journal) == ["n1"]


def test_a_failed_start_leaves_no_files(tmp_path: Path) -> None:
    unreadable = tmp_path / "journal-00000001.db"
    unreadable.mkdir()
    unreadable.with_suffix(".end").touch()
    for term in (2, 3):
        with pytest.raises(JournalError, match="Is a directory"):
            Journal(tmp_path, lease_term=term)
    assert files(tmp_path) == ["journal-00000001.db", "journal-00000001.end"]


def test_the_next_start_removes_the_files_of_killed_starts(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    for left in (
        "journal-00000002.new",
        "journal-00000002.end",
        "journal-00000003.db-journal",
        "journal-00000003.db-wal",
    ):
        (tmp_path / left).touch()
    take_over(tmp_path, 4).close()
    assert not [name for name in files(tmp_path) if "-00000002." in name or "-00000003." in name]


def test_an_unreadable_copy_removes_no_other_journal(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    take_over(tmp_path, 2, "n2").close()
    spoil(tmp_path, 2)
    before = files(tmp_path)
    for term in (3, 4):
        with pytest.raises(JournalError, match=r"journal-00000002\.db: record 1 \(NodeRegistered\) is damaged"):
            Journal(tmp_path, lease_term=term).load()
        assert files(tmp_path) == before
    with closing(sqlite3.connect(tmp_path / "journal-00000001.db")) as db:
        assert db.execute("SELECT node FROM facts").fetchall() == [("n1",)]


def test_a_journal_that_was_written_to_is_never_removed(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    journal = take_over(tmp_path, 2, "n2")
    spoil(tmp_path, 2)
    with pytest.raises(JournalError, match="record 1 "):
        journal.load()
    journal.close()
    assert "journal-00000002.db" in files(tmp_path)


@pytest.mark.parametrize("term", [4, 5])
def test_a_lease_term_must_be_above_the_journals(tmp_path: Path, term: int) -> None:
    take_over(tmp_path, 5, "n1").close()
    before = files(tmp_path)
    with pytest.raises(JournalError, match=r"journal-00000005\.db exists, but the lease is at term"):
        Journal(tmp_path, lease_term=term)
    assert files(tmp_path) == before


def test_a_journal_that_an_unshared_coordinator_has_open_is_not_taken_over(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)), pytest.raises(JournalError, match="in use by another coordinator: stop it"):
        Journal(tmp_path, lease_term=1)
    take_over(tmp_path, 2).close()


def test_a_copy_and_its_name_are_on_the_disk_before_older_journals_are_removed(tmp_path: Path) -> None:
    for term in (1, 2):
        take_over(tmp_path, term, f"n{term}").close()
    synced: list[tuple[str, list[str]]] = []

    def fsync(handle: int) -> None:
        synced.append(
            (Path(os.readlink(f"/proc/self/fd/{handle}")).name, sorted(p.name for p in tmp_path.glob("*.db")))
        )

    with Takeover(tmp_path, 3, fsync) as takeover:
        names_before_the_copy = ["journal-00000001.db", "journal-00000002.db"]
        names_with_the_copy = [*names_before_the_copy, "journal-00000003.db"]
        assert ("journal-00000003.new", names_before_the_copy) in synced
        assert synced[-1] == (tmp_path.name, names_with_the_copy)
        takeover.complete()
    assert sorted(p.name for p in tmp_path.glob("*.db")) == ["journal-00000002.db", "journal-00000003.db"]


def unsupported(source: int, target: int, count: int) -> int:
    raise OSError(errno.EOPNOTSUPP, "not supported")


def partial_range(source: int, target: int, count: int) -> int:
    if os.lseek(target, 0, os.SEEK_CUR):
        return 0
    return os.copy_file_range(source, target, 5)


@pytest.mark.parametrize("copy_range", [os.copy_file_range, unsupported, partial_range])
def test_a_copy_is_complete_on_every_file_system(tmp_path: Path, copy_range: Callable[[int, int, int], int]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"0123456789" * 1000)
    with source.open("rb") as read, target.open("wb") as write:
        copy_bytes(read, write, copy_range)
    assert target.read_bytes() == source.read_bytes()


def test_other_users_can_not_read_a_shared_journal(tmp_path: Path) -> None:
    take_over(tmp_path, 1, "n1").close()
    take_over(tmp_path, 2).close()
    assert {path.name: oct(os.stat(path).st_mode & 0o777) for path in tmp_path.glob("*.db")} == {
        "journal-00000001.db": "0o600",
        "journal-00000002.db": "0o600",
    }
