"""The engine: it detects its own suspension, reports bugs of the core, and does not act without leadership."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.turn.turn import Outcome
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.shell.engine import SUSPENDED_S, Engine
from muster.daemon.host import clock
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm


class ManualClock(SteadyClock):
    """A clock that the test sets."""

    moment = 1000.0

    def now(self) -> float:
        """The time that the test has set."""
        return self.moment


@pytest.mark.parametrize(("suspended_s", "detected"), [(SUSPENDED_S / 2, False), (2 * SUSPENDED_S, True)])
async def test_a_suspension_is_detected_before_the_first_event_after_it(
    tmp_path: Path, suspended_s: float, detected: bool
) -> None:
    manual, journal = ManualClock(), Journal(tmp_path / "state")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, SecretCredentials.create(tmp_path / "secret"), manual)
    engine.start()
    manual.moment += suspended_s
    engine.post(events.Tick())
    assert (engine.core.observed.observing_since == manual.moment) is detected
    await engine.aclose()
    journal.close()


class CoreWithBug(Core):
    """A core that reports a bug of its own rules."""

    def decide(self, event: events.Event, now: float) -> Outcome:
        """The real decision, with a reported bug."""
        outcome = super().decide(event, now)
        outcome.bugs.append("gang g1 in phase RUNNING: the rules came to no end")
        return outcome


async def test_a_bug_that_the_core_reports_is_logged_and_the_engine_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "state")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, SecretCredentials.create(tmp_path / "secret"))
    engine.core = CoreWithBug(engine.core.state, engine.clock.now())
    engine.start()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["a bug of Muster: gang g1 in phase RUNNING: the rules came to no end"]
    assert engine.running
    await engine.aclose()
    journal.close()


class LeadershipLost(Exception):
    """Raised in place of the end of the process."""


async def test_a_journaled_decision_is_not_acted_on_after_leadership_was_lost(tmp_path: Path) -> None:
    """The machine was suspended during the write, which none of its clocks shows."""

    def lost() -> None:
        raise LeadershipLost

    journal, secret = Journal(tmp_path / "state"), SecretCredentials.create(tmp_path / "secret")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, secret, confirm_leadership=lost)
    engine.start()
    with engine.journal_subscribers.subscribe() as records:
        engine.post(events.NodeAttached("n1", "boot", "i", "n1:1"))
    assert journal.position
    assert records.empty()
    with pytest.raises(LeadershipLost):
        await engine.failed
    await engine.aclose()
    journal.close()


async def test_the_event_loop_runs_while_a_journal_is_copied(tmp_path: Path) -> None:
    """Otherwise the copy of a large journal would cost the coordinator its lease."""
    state, loop_ran, seen = tmp_path / "state", threading.Event(), []
    state.mkdir()
    Journal(state, lease_term=1).close()
    slow = state / "journal-00000001.db-wal"  # a pipe: the copy ends once the event loop has run
    os.mkfifo(slow)

    def feed() -> None:
        seen.append(loop_ran.wait(60))
        slow.write_bytes(b"")

    feeding = threading.Thread(target=feed)
    feeding.start()
    slurm, secret = FakeSlurm(FakeCluster((), now=clock.wall)), SecretCredentials.create(tmp_path / "secret")
    settings = Settings("127.0.0.1:0", state, slurm, secret, Rights(frozenset()), lease_term=2)
    opening = asyncio.create_task(Coordinator.open(settings))
    asyncio.get_running_loop().call_later(0.0, loop_ran.set)
    coordinator = await opening
    assert seen == [True]
    feeding.join()
    await coordinator.stop()
