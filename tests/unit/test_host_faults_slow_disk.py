"""A disk on which each write takes seconds: it is named, and its time is held against nobody."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.journal import timed_journal
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.journal.timed_journal import CALM_S, SLOW_WRITE_S, TimedJournal
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.shell.agent_streams import AgentStreams
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.shell.probes import Prober
from muster.daemon.host import clock
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm

DEADLINE_S = 60.0


class AdvancedClock(SteadyClock):
    """The steady clock, ahead by what the test and slow writes add."""

    def __init__(self) -> None:
        super().__init__()
        self.added_s = 0.0

    def now(self) -> float:
        """Seconds since the epoch."""
        return super().now() + self.added_s


class StillClock(AdvancedClock):
    """A clock that only moves by what is added."""

    def now(self) -> float:
        """Seconds."""
        return 1000.0 + self.added_s


class SlowJournal(Journal):
    """The journal on a disk that takes `write_s` for each write, as `clock` shows."""

    def __init__(self, folder: Path, clock: AdvancedClock, write_s: float) -> None:
        super().__init__(folder)
        self.clock, self.write_s = clock, write_s

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """See Journal.append."""
        self.clock.added_s += self.write_s
        return super().append(decided, at, cause)


def make_engine(tmp_path: Path, write_s: float) -> tuple[Engine, AdvancedClock, SlowJournal]:
    """An engine on a slow disk, and its clock."""
    still = StillClock()
    journal = SlowJournal(tmp_path / "state", still, write_s)
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    credentials = SecretCredentials.create(tmp_path / "secret")
    return Engine(journal, journal.load(), slurm, credentials, still), still, journal


def attached(number: int) -> events.Event:
    """An event that writes one fact."""
    return events.NodeAttached(f"n{number}", "boot", "i", f"n{number}:1")


@pytest.mark.parametrize(("write_s", "writes"), [(5.0, 1), (0.6, 2), (0.09, 20)])
async def test_contacts_from_before_long_writes_do_not_count(tmp_path: Path, write_s: float, writes: int) -> None:
    """Several writes without a look at what arrived meanwhile are as long as one."""
    engine, still, journal = make_engine(tmp_path, write_s)
    engine.start()
    for number in range(writes):
        engine.post(attached(number))
    assert still.now() - engine.core.observed.observing_since < SLOW_WRITE_S
    assert still.now() > 1000.0 + SLOW_WRITE_S
    await engine.aclose()
    journal.close()


async def test_the_log_names_the_disk_and_not_a_suspension(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, _, journal = make_engine(tmp_path, 3.2)
    engine.start()
    engine.post(attached(1))
    engine.post(events.Tick())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert f"the disk of {tmp_path / 'state'} is slow: a write to journal.db took 3.2 s" in warnings[0]
    await engine.aclose()
    journal.close()


def test_a_disk_that_is_fast_again_is_said_to_be_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    still = StillClock()
    journal = SlowJournal(tmp_path / "state", still, 2.0)
    timed = TimedJournal(journal, still.now)
    fact = facts.NodeRegistered("n1", "boot", "n1:1")
    for _ in range(100):
        timed.append([fact], 1.0, "a test")
        timed.note_calm()
    journal.write_s = 0.01
    timed.append([fact], 1.0, "a test")
    timed.note_calm()
    said = [record.getMessage() for record in caplog.records]
    assert 1 < len(said) <= 21  # 200 s, and at most a line each 10 s
    assert all("is slow" in line for line in said)
    still.added_s += CALM_S + 1.0
    timed.note_calm()
    timed.note_calm()
    assert [record.getMessage() for record in caplog.records][len(said) :] == [
        f"the disk of {tmp_path / 'state'} is fast again, after 259 s"
    ]
    assert timed.total_s == pytest.approx(200.01)
    journal.close()


class StuckJournal(Journal):
    """The journal on a disk that does not answer until `answers` is set."""

    answers: threading.Event

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """See Journal.append."""
        self.answered = self.answers.wait(DEADLINE_S)
        return super().append(decided, at, cause)


class SetWhenSaid(logging.Handler):
    """Sets `event` at the first line that holds `words`."""

    def __init__(self, words: str, event: threading.Event) -> None:
        super().__init__()
        self._words, self._event = words, event

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if self._words in record.getMessage():
            self._event.set()


def test_a_write_that_does_not_end_is_named_while_it_lasts(tmp_path: Path) -> None:
    """The write ends only once the log has named the disk."""
    journal = StuckJournal(tmp_path / "state")
    journal.answers = threading.Event()
    over = threading.Event()
    handlers = [
        SetWhenSaid(f"the disk of {tmp_path / 'state'} does not answer: a write to journal.db", journal.answers),
        SetWhenSaid("answers again", over),
    ]
    log = logging.getLogger(timed_journal.__name__)
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    timed = TimedJournal(journal, clock.monotonic, check_s=0.01)
    timed.start()
    timed.append([facts.NodeRegistered("n1", "boot", "n1:1")], 1.0, "a test")
    assert journal.answered
    assert over.wait(DEADLINE_S)
    timed.stop()
    for handler in handlers:
        log.removeHandler(handler)
    log.setLevel(level)
    journal.close()


@pytest.mark.parametrize(("write_s", "posted"), [(0.0, [Silence.KERNEL_ONLY]), (0.3, [])])
async def test_an_answer_that_a_writing_coordinator_could_not_read_is_no_silence(
    tmp_path: Path, write_s: float, posted: list[Silence]
) -> None:
    """The kernel accepts, and no answer comes in time. The coordinator wrote for most of it, or never."""
    found: list[events.Event] = []
    readings, probed = [10.0 + write_s, 10.0], asyncio.Event()

    def written_s() -> float:
        """The last reading follows the probe. What is posted then is posted before any other task runs."""
        if len(readings) == 1:
            probed.set()
        return readings.pop()

    credentials = SecretCredentials.create(tmp_path / "secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        prober = Prober(credentials, AgentStreams(), 1, found.append, written_s=written_s)
        prober.start(ProbeRequest(1, "g", "n1", ("agent",), address, "", 0.4))
        async with asyncio.timeout(DEADLINE_S):
            await probed.wait()
        await prober.aclose()
    assert [answer.silence for answer in found if isinstance(answer, events.ProbeAnswered)] == posted


@pytest.mark.parametrize("write_s", [0.9, 4.0])
async def test_a_recovery_on_a_slow_disk_removes_the_faulty_node_only(tmp_path: Path, write_s: float) -> None:
    world = ScriptedWorld.create(tmp_path)
    slow = AdvancedClock()
    journal = SlowJournal(world.folder, slow, write_s)
    await world.start_coordinator(journal)
    assert world.coordinator
    world.coordinator.engine.clock = slow
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ("n1", "n2"))
    await world.send_signal("n2", 79)
    await world.wait_for_facts(facts.MemberRemoved)
    await world.wait_for_duty("RUN 2", ("n1", "n3"))
    removed = await world.wait_for_facts(facts.MemberRemoved)
    assert [record.node for record in removed] == ["n2"]
    await world.close()
