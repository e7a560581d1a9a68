"""An agent is killed, or its node loses power, at each named point between a snapshot and its commit: the gang goes on
from memory, and loses two finished steps at most."""

import random

import pytest

from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.environment.network import RELIABLE, Fate, PeerCallConditions, PeerCalls
from muster.simulator.scenario import Scenario
from muster.simulator.world.snapshot_crashes import SnapshotCrash, SnapshotPoint


@pytest.mark.parametrize("powers_off", [False, True], ids=["killed", "powered off"])
@pytest.mark.parametrize("point", SnapshotPoint)
def test_a_restorable_step_is_left(point: SnapshotPoint, powers_off: bool) -> None:
    scenario = Scenario(3, 1)
    scenario.run_until(lambda: scenario.core.observed.gang("g").step_number >= 5)
    scenario.world.snapshot_crashes.arm(SnapshotCrash("g", point, 1, powers_off))
    scenario.run_until(lambda: any("FAULT" in line for line in scenario.transcript()))
    reached = scenario.core.observed.gang("g").step_number
    scenario.run_until(lambda: scenario.gang.newest.generation == 2 and scenario.gang.phase == Phase.RUNNING)
    restored = scenario.gang.restore.restored_version
    assert restored is not None
    assert restored.step >= reached - 2
    scenario.run_until(lambda: scenario.core.observed.gang("g").step_number > reached + 3)


def test_calls_between_agents_meet_every_fate() -> None:
    calls = PeerCalls(PeerCallConditions(0.2, 0.2, 0.2, 0.2, longest_s=3.0), random.Random(1))
    fates = [calls.draw() for _ in range(200)]
    assert {fate.arrives for fate in fates} == {fate.answered for fate in fates} == {True, False}
    assert any(fate.late_s for fate in fates)
    assert any(fate.again_s for fate in fates)
    assert max(max(fate.late_s, fate.again_s) for fate in fates) <= 3.0


def test_a_reliable_network_draws_nothing() -> None:
    generator = random.Random(1)
    state = generator.getstate()
    assert PeerCalls(RELIABLE, generator).draw() == Fate()
    assert generator.getstate() == state
