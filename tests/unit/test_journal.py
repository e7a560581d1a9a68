"""The journal: appended facts are there after a restart; a journal that can't be used is an error."""

from __future__ import annotations

import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import CheckOutcome, CorruptCopy, GangSpec, NodeCheck, Version
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.journal.end_mark import EndMark
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.fabric.model.record import record_of
from muster.fabric.testing.generators import fat_tree
from muster.node_health import NodeHealth

SPEC = GangSpec(nodes=2, spares=1, min_nodes=2)


def _story() -> list[facts.Fact]:
    """A gang that loses a node and ends: at least one fact of every kind."""
    seats = (facts.Seat("n1", 0, "n2", ("n2", "n3")), facts.Seat("n2", 1, "n1", ("n1",)))
    swapped = (seats[0], facts.Seat("n3", 1, "n1", ("n1",)))
    source = facts.ShardSource(1, "n1", False, "abc")
    call = facts.SlurmCallOwed("g", 1, "down", 7, "n2", "muster: n2 is lost", ("n2",))
    return [
        facts.NodeRegistered("n2", "boot", "10.0.0.2:7071"),
        facts.GangRegistered("g", 7, 1000, "train", SPEC, '{"run_dir":"/run"}'),
        facts.PhaseChanged("g", Phase.GATHERING, ""),
        *(facts.MemberJoined("g", n, 7, "i1", f"{n}:1", n == "n1", "leaf1") for n in ("n1", "n2", "n3")),
        facts.JobChanged("g", ("n1", "n2", "n3")),
        facts.FabricNoted("g", record_of(fat_tree(2, 2)), ("n1: its link has 1 GB/s",), ("a switch has no name",)),
        facts.GenerationFenced("g", 0, "start", True, "n1", 0, 1.0),
        facts.GenerationStarted("g", 1, seats, (), "n1", 4001, None, (), "", 2.0, "start"),
        facts.PhaseChanged("g", Phase.RUNNING, ""),
        facts.FirstStep("g", 1, 1),
        facts.FlushOrdered("g", 1, Version(1, 5), (source,), "asked for"),
        facts.FlushEnded("g", 1, "/durable/5", ""),
        facts.GenerationFenced("g", 1, "n2 is lost", True, "n1", 9, 3.0),
        facts.NodeJudged("n2", NodeHealth.LOST, "silent"),
        call,
        facts.MemberRemoved("g", "n2", "silent", False),
        facts.StoreMoved("g", "n3"),
        facts.GenerationStarted("g", 2, swapped, (), "n3", 4002, Version(1, 8), (source,), "", 4.0, "swap"),
        facts.FirstStep("g", 2, 9),
        facts.SlurmCallSettled("g", 1, ""),
        facts.PoolNodeRequested("g", 1, "n1", ("--partition=shared",)),
        facts.PoolJobQueued("g", 1, 8),
        facts.MemberJoined("g", "n4", 8, "i1", "n4:1", False, "leaf1"),
        facts.NewcomerKnown("g", "n4"),
        facts.PoolRequestClosed("g", 1, "wanted no more"),
        facts.NodeJudged("n1", NodeHealth.DEGRADED, "Xid 64", Response.SWAP),
        facts.SwapPlanned("g", "n1", 2, "Xid 64"),
        facts.GrowthPlanned("g", 1, 3, "grows from 2 to 3 ranks with n3"),
        facts.HangDetected("g", 2, "hang: no rank has finished a step for 61 s", 4.5, "n1"),
        facts.PrecursorEnded("n2", "gpu-throttle 64 on GPU 2", "GPU throttled 64: over"),
        facts.NodeDrainRequested("n1", "root", "its fan is loud"),
        facts.NodeDrainEnded("n1", "in service in Slurm (IDLE)"),
        facts.StragglerDetected("g", 2, 1, "n1", "rank 1 on n1 computes 31 % longer"),
        facts.StragglerDetected("g", 2, 1, "n1", "rank 1 on n1 computes 31 % longer, for 300 s", Response.SWAP),
        facts.ReplicasDisagreed("g", 2, Version(2, 9), (1,), ("n1",), "n1", "rank 1 on n1 differs"),
        facts.NotFiniteReported("g", 2, 1, "n1", 9, "loss = nan"),
        facts.LossNoted("g", 2, LossKind.SPIKE, "n1", 9, 8.1, 2.31),
        facts.LaunchUnsupervised("g", "line 4, srun x: it runs in a container"),
        facts.RolledBack("g", 2, 9, Version(1, 4), "/durable/4", 119, "a spike"),
        facts.CorruptCopyFound("g", "n1", CorruptCopy(1, Version(1, 12), True, 1, 250)),
        facts.StateRestored("g", 2, Version(1, 12), 1 << 30, 0, 1 << 20, (("n2", 1 << 20),), 0.5),
        facts.NodeChecked("g", "n1", 7, NodeCheck(CheckOutcome.WRONG, "a product differs from the known one")),
        facts.CorrelatedFaultSuspected("n1", "Xid 74: NVLink error"),
        facts.CorrelatedFaultResolved("n1", "n2"),
        facts.GenerationFenced("g", 2, "rank 0 exited with 1", False, "n1", 12, 5.0),
        facts.ActionWithheld("g", "n1", "drain", "Xid 79; observe mode"),
        facts.StopPlanned("g", "Slurm has sent SIGTERM", Phase.REQUEUED),
        facts.PhaseChanged("g", Phase.REQUEUED, "no spare is left"),
        facts.JobRestarted("g", 7, 1),
        facts.PhaseChanged("g", Phase.GATHERING, ""),
        facts.GangShrunk("g", 1, "a tensor group spans 2 leaves"),
        facts.GangEnded("g", Phase.FAILED, 95, "nobody came"),
        facts.JobEnded("g", "FAILED"),
        facts.GangRegistered("h", 8, 1000, "next", SPEC, "{}"),
        facts.GangForgotten("g"),
    ]


def _fill(journal: Journal, story: list[facts.Fact]) -> DurableState:
    state = journal.load()
    for number, fact in enumerate(story):
        apply(state, fact, 100.0 + number)
        journal.append([fact], 100.0 + number, f"cause {number}")
        journal.snapshot_if_due(state)
    return state


def _alter(folder: Path, sql: str) -> None:
    """Change the journal while the coordinator has it open."""
    db = sqlite3.connect(folder / "journal.db")
    with db:
        db.execute(sql)
    db.close()


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of this process can't grow beyond 256 KiB: a write then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (262144, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_the_story_has_every_kind_of_fact() -> None:
    assert {type(fact) for fact in _story()} == set(facts.FACTS.values())


@pytest.mark.parametrize("every", [1, 2, 7, 1000])
def test_a_replay_from_a_snapshot_equals_a_replay_of_all_facts(tmp_path: Path, every: int) -> None:
    journal = Journal(tmp_path, snapshot_every=every)
    state = _fill(journal, _story())
    journal.close()
    again = Journal(tmp_path, snapshot_every=every)
    assert again.load() == state
    assert again.load(use_snapshot=False) == state
    again.close()
    with closing(sqlite3.connect(again.path)) as db:
        snapshots = db.execute("SELECT count(*) FROM snapshots").fetchone()[0]
    assert bool(snapshots) == (every <= len(_story()))


def test_each_start_raises_the_term(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        journal = Journal(tmp_path)
        terms.append(journal.term)
        journal.close()
    assert terms == [1, 2, 3]


def test_facts_of_one_event_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    _alter(
        tmp_path,
        "CREATE TRIGGER full BEFORE INSERT ON facts WHEN NEW.node = 'n3' BEGIN SELECT RAISE(ABORT, 'no room'); END",
    )
    with pytest.raises(JournalError, match="no room"):
        journal.append([facts.NodeRegistered(node, "b", "a:1") for node in ("n1", "n2", "n3")], 1.0, "")
    assert journal.history("", 0, 10) == []
    journal.close()


def test_a_gangs_history_includes_the_health_of_its_nodes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    _fill(journal, _story())
    journal.append([facts.NodeJudged("elsewhere", NodeHealth.LOST, "another gang's")], 200.0, "")
    names = [(r.name, r.node) for r in journal.history("g", 0, 100)]
    assert ("NodeJudged", "n2") in names
    assert ("NodeJudged", "elsewhere") not in names
    assert ("NodeRegistered", "n2") not in names
    everything = journal.history("", 0, 100)
    assert [r.position for r in everything] == sorted({r.position for r in everything})
    assert journal.history("", everything[3].position, 2) == everything[4:6]
    journal.close()


def test_other_users_can_not_read_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state")
    _fill(journal, _story())
    assert {oct(path.stat().st_mode & 0o077) for path in (tmp_path / "state").iterdir()} == {"0o0"}
    journal.close()


def test_a_newer_format_is_an_error(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    _alter(tmp_path, "UPDATE meta SET value = 99 WHERE key = 'schema'")
    with pytest.raises(JournalError, match=r"newer muster \(format 99, this one knows 11\)"):
        Journal(tmp_path)


def test_a_folder_belongs_to_one_coordinator(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use by another coordinator"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def _fill_the_disk(journal: Journal, written: list[int]) -> None:
    """Append until an append fails; `written` gets the number of each record that was written."""
    for number in range(1000):
        journal.append([facts.NodeRegistered(f"n{number}", "b" * 1000, "a:1")], 1.0, "")
        written.append(number)


def test_records_from_before_a_full_disk_are_there_afterwards(tmp_path: Path, small_files: None) -> None:
    journal, written = Journal(tmp_path), list[int]()
    with pytest.raises(JournalError, match="can't write the journal"):
        _fill_the_disk(journal, written)
    journal.close()
    again = Journal(tmp_path)
    assert 0 < len(written) == len(again.load().nodes)
    again.close()


def test_a_folder_that_can_not_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"can't open the journal .*/file/state/journal\.db: .*Not a directory"):
        Journal(tmp_path / "file" / "state")


def test_the_error_names_a_damaged_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    _fill(journal, _story())
    journal.close()
    _alter(tmp_path, "UPDATE facts SET json = '{}' WHERE position = 4")
    again = Journal(tmp_path)
    with pytest.raises(JournalError, match=r"record 4 \(MemberJoined\) is damaged: its checksum is wrong"):
        again.load()
    again.close()


def test_the_error_names_a_missing_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    _fill(journal, _story())
    journal.close()
    _alter(tmp_path, "DELETE FROM facts WHERE position = 9")
    again = Journal(tmp_path)
    with pytest.raises(JournalError, match="record 9 is missing; the next one is 10"):
        again.load()
    again.close()


def test_the_owner_of_a_forgotten_gang_is_known(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    state = _fill(journal, _story())
    assert "g" not in state.gangs
    assert journal.find_owner("g") == journal.find_owner(job=7) == ("g", 1000, ())
    assert journal.find_owner(job=8) == ("h", 1000, ())
    assert journal.find_owner("nobody") is journal.find_owner(job=9) is None
    assert journal.history("g", 0, 100)[-1].name == "GangForgotten"
    journal.close()


def test_larger_snapshots_are_written_less_often(tmp_path: Path) -> None:
    journal, state, sizes = Journal(tmp_path, snapshot_every=1), DurableState(), []
    for number in range(300):
        fact = facts.NodeRegistered(f"n{number}", "boot", "10.0.0.1:7071")
        apply(state, fact, 1.0)
        journal.append([fact], 1.0, "")
        if journal.snapshot_if_due(state):
            sizes.append(len(state.dump()))
    written = sum(len(record.json) for record in journal.history("", 0, 300))
    assert sum(sizes[:-1]) < written, "the facts after a snapshot take its bytes before the next one is due"
    assert sizes == sorted(sizes)
    assert len(sizes) < 20
    journal.close()


def test_records_are_there_though_the_end_mark_could_not_be_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    mark, journal._end_mark = journal._end_mark, EndMark(Path("/dev/full"))
    with pytest.raises(JournalError, match="No space left on device"):
        journal.append([facts.NodeRegistered("n1", "boot", "n1:1")], 1.0, "")
    journal._end_mark.close()
    journal._end_mark = mark
    journal.close()
    with closing(Journal(tmp_path)) as again:
        assert set(again.load().nodes) == {"n1"}
