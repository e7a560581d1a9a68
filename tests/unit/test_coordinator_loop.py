"""The engine notices that it has stood still before it decides on what happened meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.turn import Outcome
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.shell.engine import ASLEEP_S, Engine
from muster.daemon.host import clock
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm


class PlayedClock(SteadyClock):
    """Stands still until it is moved."""

    moment = 1000.0

    def now(self) -> float:
        """The moment it was moved to."""
        return self.moment


@pytest.mark.parametrize(("still_s", "noticed"), [(ASLEEP_S / 2, False), (2 * ASLEEP_S, True)])
async def test_the_first_event_after_a_standstill_is_decided_in_its_light(
    tmp_path: Path, still_s: float, noticed: bool
) -> None:
    played, journal = PlayedClock(), Journal(tmp_path / "state")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, SecretCredentials.create(tmp_path / "secret"), played)
    engine.start()
    played.moment += still_s
    engine.post(events.Tick())
    assert (engine.core.observed.since == played.moment) is noticed
    await engine.aclose()
    journal.close()


class Unsettled(Core):
    """A core with a bug, which it reports."""

    def decide(self, event: events.Event, now: float) -> Outcome:
        """As the real one, and a bug."""
        outcome = super().decide(event, now)
        outcome.bugs.append("gang g1 in phase RUNNING: the rules came to no end")
        return outcome


async def test_what_the_core_finds_wrong_with_itself_is_logged_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "state")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, SecretCredentials.create(tmp_path / "secret"))
    engine.core = Unsettled(engine.core.state, engine.clock.now())
    engine.start()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["a bug of Muster: gang g1 in phase RUNNING: the rules came to no end"]
    assert engine.running
    await engine.aclose()
    journal.close()


class Replaced(Exception):
    """Stands for the end of the process."""


async def test_what_was_written_is_not_done_where_another_may_act(tmp_path: Path) -> None:
    """The machine stood still while it wrote: no clock of it shows that."""

    def replaced() -> None:
        raise Replaced

    journal, secret = Journal(tmp_path / "state"), SecretCredentials.create(tmp_path / "secret")
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    engine = Engine(journal, journal.load(), slurm, secret, before_acting=replaced)
    engine.start()
    with engine.followers.subscribe() as told:
        engine.post(events.NodeAttached("n1", "boot", "i", "n1:1"))
    assert journal.position
    assert told.empty()
    with pytest.raises(Replaced):
        await engine.failed
    await engine.aclose()
    journal.close()


async def test_the_event_loop_goes_on_while_a_journal_is_copied(tmp_path: Path) -> None:
    """Else a large one would cost whoever copies it the lease."""
    state, moved, seen = tmp_path / "state", threading.Event(), []
    state.mkdir()
    Journal(state, lease_term=1).close()
    slow = state / "journal-00000001.db-wal"  # a pipe: it is copied once something else has moved
    os.mkfifo(slow)

    def feed() -> None:
        seen.append(moved.wait(5))
        slow.write_bytes(b"")

    feeding = threading.Thread(target=feed)
    feeding.start()
    slurm, secret = FakeSlurm(FakeCluster((), now=clock.wall)), SecretCredentials.create(tmp_path / "secret")
    settings = Settings("127.0.0.1:0", state, slurm, secret, Rights(frozenset()), lease_term=2)
    opening = asyncio.create_task(Coordinator.open(settings))
    asyncio.get_running_loop().call_later(0.0, moved.set)
    coordinator = await opening
    assert seen == [True]
    feeding.join()
    await coordinator.stop()
