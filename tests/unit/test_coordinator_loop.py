"""The engine notices that it has stood still before it decides on what happened meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.daemon import clock
from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.journal import Journal
from muster.daemon.coordinator.loop import ASLEEP_S, Engine
from muster.daemon.coordinator.steady import SteadyClock
from muster.daemon.identity import SecretCredentials
from muster.slurm.client.fake import FakeSlurm
from muster.slurm.client.fake_cluster import FakeCluster


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
    engine = Engine(journal, slurm, SecretCredentials.create(tmp_path / "secret"), played)
    engine.start()
    played.moment += still_s
    engine.post(e.Tick())
    assert (engine.core.sight.since == played.moment) is noticed
    await engine.aclose()
    journal.close()
