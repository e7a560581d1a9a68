"""docs/operations/backup.md: its program copies a journal that a coordinator writes meanwhile, and the copy is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from muster.daemon.coordinator.journal.journal import Journal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "backup.md"

# A coordinator: registers nodes, `last` of them or without end, and tells the number of each that is in the journal.
WRITES = """
import itertools, sys
from pathlib import Path
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.journal.journal import Journal
folder, term, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
journal = Journal(folder, lease_term=term)
for number in itertools.count(1):
    journal.append([facts.NodeRegistered(f"n{number}", "boot", f"n{number}:1")], float(number), "x" * 4000)
    print(number, flush=True)
    if number == last:
        sys.stdin.read()
        break
"""


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """The program, as the page shows it."""
    shown = re.search(r"<<'END'\n(.*?)^END$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    program = tmp_path / "muster-backup"
    program.write_text(shown[1])
    return program


@contextmanager
def _written(folder: Path, term: int, last: int = 0) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", WRITES, str(folder), str(term), str(last)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer
            assert writer.poll() is None, "the coordinator has ended: the backup was in its way"
        finally:
            writer.kill()


def _read_until(writer: subprocess.Popen[str], number: int) -> None:
    assert writer.stdout
    while int(writer.stdout.readline()) < number:
        pass


def _back_up(program: Path, journal: Path, copy: Path) -> None:
    subprocess.run([sys.executable, program, journal, copy], check=True, timeout=120)


def _nodes(folder: Path, lease_term: int = 0) -> int:
    """How many nodes a coordinator knows that starts in `folder`."""
    with closing(Journal(folder, lease_term=lease_term)) as journal:
        return len(journal.load().nodes)


def test_a_journal_is_copied_while_it_is_written(backup: Path, tmp_path: Path) -> None:
    restored = tmp_path / "restored"
    restored.mkdir()
    with _written(tmp_path / "state", 0) as writer:
        _read_until(writer, 50)
        _back_up(backup, tmp_path / "state" / "journal.db", restored / "journal.db")
    assert (restored / "journal.db").stat().st_mode & 0o777 == 0o600
    assert _nodes(restored) >= 50


def test_the_journal_of_a_shared_folder_is_copied_while_a_coordinator_has_it(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    restored = tmp_path / "restored"
    restored.mkdir()
    with _written(tmp_path / "state", 3, last=600) as writer:
        _read_until(writer, 50)
        _back_up(backup, tmp_path / "state" / "journal-00000003.db", restored / "journal.db")
        _read_until(writer, 600)
    assert _nodes(restored, lease_term=1) >= 50


def test_a_copied_file_alone_lacks_records(backup: Path, tmp_path: Path) -> None:
    """Why the page says that cp is no backup."""
    copy = tmp_path / "copy"
    copy.mkdir()
    with _written(tmp_path / "state", 0, last=50) as writer:
        _read_until(writer, 50)
        shutil.copy(tmp_path / "state" / "journal.db", copy / "journal.db")
    assert _nodes(copy) < 50
