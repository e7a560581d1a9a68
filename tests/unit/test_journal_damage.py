"""The journal after a power cut, a kill, a change of version or damage by the disk: every acknowledged record is there,
or opening the journal fails. The journal never guesses."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal.end_mark import EndMark
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.journal.migrations import FORMAT, MIGRATIONS
from muster.node_health import NodeHealth

EVENTS = 16


def _event(number: int) -> list[facts.Fact]:
    """The two facts of one event: two, so that a test would notice half an event."""
    node = f"n{number}"
    return [
        facts.NodeRegistered(node, f"boot {number}", "10.0.0.1:7071"),
        facts.NodeJudged(node, NodeHealth.LOST, "silent"),
    ]


def _states() -> list[DurableState]:
    """The durable state after each number of events, from none to all."""
    states, state = [DurableState()], DurableState()
    for number in range(EVENTS):
        for fact in _event(number):
            apply(state, fact, float(number))
        states.append(DurableState.load(state.dump()))
    return states


def _written(folder: Path, *, closed: bool = True) -> Path:
    """The folder of a journal with all events. Not `closed`: the folder as a killed process leaves it."""
    journal, state = Journal(folder, snapshot_every=10), DurableState()
    for number in range(EVENTS):
        for fact in _event(number):
            apply(state, fact, float(number))
        journal.append(_event(number), float(number), "an event")
        journal.snapshot_if_due(state)
    if closed:
        journal.close()
        return folder
    copy = folder.with_name("left behind")
    shutil.copytree(folder, copy)
    journal.close()
    return copy


def _read(folder: Path) -> DurableState:
    """The durable state that a coordinator would start from. Reads every part of the file."""
    journal = Journal(folder)
    try:
        state = journal.load()
        assert journal.load(use_snapshot=False) == state
        return state
    finally:
        journal.close()


# -- torn and damaged files --


def _cut(folder: Path, name: str, length: int) -> Path:
    """A copy of the folder in which a file ends early."""
    copy = folder.with_name("cut")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    with open(copy / name, "r+b") as file:
        file.truncate(length)
    return copy


def test_a_torn_log_ends_with_a_whole_event(tmp_path: Path) -> None:
    """A power cut tears only records that were not acknowledged. Earlier records are there, and events are whole."""
    left, states = _written(tmp_path / "state", closed=False), _states()
    (left / "journal.end").unlink()  # not synced: a power cut may take it
    length, seen = (left / "journal.db-wal").stat().st_size, set[int]()
    for at in range(0, length, 2063):  # a prime number, so that frames are torn at many different offsets
        state = _read(_cut(left, "journal.db-wal", at))
        assert state in states
        seen.add(states.index(state))
    assert seen >= set(range(1, EVENTS))
    assert _read(_cut(left, "journal.db-wal", length)) == states[-1]


def test_a_log_that_lost_acknowledged_records_is_an_error(tmp_path: Path) -> None:
    left = _written(tmp_path / "state", closed=False)
    assert _read(_cut(left, "journal.db-wal", (left / "journal.db-wal").stat().st_size)) == _states()[-1]
    cut = _cut(left, "journal.db-wal", (left / "journal.db-wal").stat().st_size // 2)
    with pytest.raises(JournalError, match=rf"but record {2 * EVENTS} of term 1 was written: newer records are lost"):
        Journal(cut)
    (cut / "journal.end").unlink()  # as the error says
    assert _read(cut) in _states()


def test_a_damaged_page_is_found_or_harmless(tmp_path: Path) -> None:
    folder = _written(tmp_path / "state")
    whole, chance = (folder / "journal.db").read_bytes(), random.Random(1)
    page, found = 4096, 0
    for start in range(0, len(whole), page):
        for filling in (bytes(page), chance.randbytes(page), whole[:page], whole[start + 1 : start + page] + b"\0"):
            found += _found(folder, whole[:start] + filling + whole[start + page :])
    assert found > len(whole) / page


def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    folder = _written(tmp_path / "state")
    whole, chance, found = (folder / "journal.db").read_bytes(), random.Random(2), 0
    for _ in range(200):
        at = chance.randrange(len(whole))
        found += _found(folder, whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
    assert found > 15


def _found(folder: Path, content: bytes) -> bool:
    """Whether a start on this content fails. Where it does not fail, the damage must have no effect."""
    end = (folder / "journal.end").read_bytes()
    (folder / "journal.db").write_bytes(content)
    try:
        assert _read(folder) == _states()[-1]
    except JournalError:
        return True
    finally:
        for name in ("journal.db-wal", "journal.db-shm"):
            (folder / name).unlink(missing_ok=True)
        (folder / "journal.end").write_bytes(end)
    return False


def test_a_read_only_journal_is_an_error(tmp_path: Path) -> None:
    """Write version 3 in the file makes it read-only, for root too."""
    folder = _written(tmp_path / "state")
    with open(folder / "journal.db", "r+b") as file:
        file.seek(18)
        file.write(b"\3")
    with pytest.raises(JournalError, match=r"can't open the journal .*readonly database"):
        Journal(folder)


@pytest.mark.parametrize("words", [b"", bytes(41), b"00000000000000000001", b"not an end mark, another text"])
def test_a_damaged_end_mark_reads_as_zeros(tmp_path: Path, words: bytes) -> None:
    (tmp_path / "journal.end").write_bytes(words)
    end = EndMark(tmp_path / "journal.end")
    assert end.read() == (0, 0)
    end.write(3, 12)
    assert end.read() == (3, 12)
    end.close()


# -- killed processes --


WRITER = """
import sys
from pathlib import Path
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal.journal import Journal

journal, number = Journal(Path(sys.argv[1]), snapshot_every=10), 0
ledger = journal.load()
while True:
    decided = [facts.NodeRegistered(f"n{number}{half}", "boot", "10.0.0.1:7071") for half in "ab"]
    for fact in decided:
        apply(ledger, fact, 1.0)
    journal.append(decided, 1.0, "")
    journal.snapshot_if_due(ledger)
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("acknowledged", [1, 2, 7, 40, 150])
def test_records_that_a_killed_process_acknowledged_are_there(tmp_path: Path, acknowledged: int) -> None:
    command = [sys.executable, "-Ic", WRITER, str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if int(line) + 1 == acknowledged:
                process.send_signal(signal.SIGKILL)
    state = _read(tmp_path / "state")
    events = {name[1:-1] for name in state.nodes}
    assert len(events) >= acknowledged
    assert set(state.nodes) == {f"n{number}{half}" for number in range(len(events)) for half in "ab"}


# -- other versions --


def _of_format_1(folder: Path) -> DurableState:
    """A journal as the first release wrote it, with a snapshot and a tail."""
    folder.mkdir()
    db, state = sqlite3.connect(folder / "journal.db"), DurableState()
    for statement in MIGRATIONS[0]:
        db.execute(statement)
    for number in range(EVENTS):
        for fact in _event(number):
            apply(state, fact, float(number))
            row = (float(number), "", f"n{number}", *facts.encode(fact), describe(fact), "")
            db.execute("INSERT INTO facts (at, gang, node, name, json, text, cause) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        if number == EVENTS // 2:
            db.execute("INSERT INTO snapshots VALUES (?, ?)", (2 * (number + 1), state.dump()))
    db.execute("UPDATE meta SET value = 4 WHERE key = 'term'")
    db.commit()
    db.close()
    return state


def test_an_older_format_is_migrated(tmp_path: Path) -> None:
    state = _of_format_1(tmp_path / "state")
    journal = Journal(tmp_path / "state")
    assert journal.term == 5
    assert journal.load() == journal.load(use_snapshot=False) == state
    journal.append([facts.NodeRegistered("new", "boot", "a:1")], 100.0, "")
    assert len(journal.history("", 0, 1000)) == 2 * EVENTS + 1
    journal.close()
    assert set(_read(tmp_path / "state").nodes) == {*state.nodes, "new"}
    db = sqlite3.connect(tmp_path / "state" / "journal.db")
    assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == (FORMAT,)
    db.close()


def test_an_interrupted_migration_is_repeated(tmp_path: Path) -> None:
    """An interrupted migration leaves the old journal or the new one, nothing between them."""
    state = _of_format_1(tmp_path / "state")
    journal = Journal(tmp_path / "state")
    left = tmp_path / "left behind"
    shutil.copytree(tmp_path / "state", left)
    journal.close()
    (left / "journal.end").unlink()
    length = (left / "journal.db-wal").stat().st_size
    assert length > 0
    for at in range(0, length + 1, 1031):
        assert _read(_cut(left, "journal.db-wal", at)) == state


def test_a_newer_journal_is_an_error_and_stays_unchanged(tmp_path: Path) -> None:
    folder = _written(tmp_path / "state")
    db = sqlite3.connect(folder / "journal.db")
    with db:
        db.execute(f"UPDATE meta SET value = {FORMAT + 1} WHERE key = 'schema'")
    db.close()
    before = (folder / "journal.db").read_bytes()
    with pytest.raises(JournalError, match=rf"a newer muster \(format {FORMAT + 1}, this one knows {FORMAT}\)"):
        Journal(folder)
    assert (folder / "journal.db").read_bytes() == before
