"""All ranks of a gang are idle, and its job has said for how long they may be. The script need not use the library."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS

ALLOWED_S = 40.0
NODES = ("n0", "n1", "n2")


def hanging(*, hang_after_idle_s: float = ALLOWED_S, **more: object) -> Scenario:
    """A gang whose script has never declared a step. A rank hangs in a socket, and the others wait for it."""
    world = Scenario(3, 0, hang_after_s=60.0, hang_after_idle_s=hang_after_idle_s, **more)  # type: ignore[arg-type]
    _meet_and_hang(world, 1)
    return world


def _meet_and_hang(world: Scenario, generation: int) -> None:
    world.run_until(lambda: _met(world, generation), 900.0)
    world.hang_rank("n1")


def _met(world: Scenario, generation: int) -> bool:
    newest = world.world.newest_training("g")
    return newest is not None and newest.generation == generation and newest.began


def found(world: Scenario) -> list[facts.HangDetected]:
    return world.facts(facts.HangDetected)


def test_a_gang_that_is_idle_for_as_long_as_its_job_allows_is_restarted_with_stacks() -> None:
    world = hanging()
    began = world.now
    world.run_until(lambda: bool(found(world)), 100.0)
    assert ALLOWED_S < world.now - began < 1.25 * ALLOWED_S + 3.0
    (hang,) = found(world)
    assert hang.reason == "hang: all ranks have been idle for 40 s or more, and every agent answers"
    assert (hang.node, round(world.now - hang.suspected_at)) == ("", 40)
    world.run_until(lambda: world.gang.newest.generation == 2 and world.gang.phase is Phase.RUNNING, 20.0)
    assert [world.agent(node).stacks_generation for node in NODES] == [1] * 3
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())


@pytest.mark.parametrize("node", NODES)
def test_one_rank_that_computes_keeps_the_gang(node: str) -> None:
    """It may be the only one that has work, and a rank that waits in a loop looks the same."""
    world = hanging()
    world.hang_rank(node, "silent")
    world.run_for(500.0)
    assert found(world) == []


def test_the_least_idle_rank_counts() -> None:
    world = hanging()
    world.report_idle(3, "n2")
    world.run_for(500.0)
    assert found(world) == []


def test_a_rank_that_becomes_active_while_the_agents_are_asked_keeps_the_gang() -> None:
    world = hanging()
    world.run_until(lambda: world.core.observed.gang("g").stall is not None, 100.0)
    world.report_idle(0, "n1")
    world.run_for(500.0)
    assert found(world) == []


def test_no_generation_hangs_where_one_agent_does_not_measure() -> None:
    world = hanging()
    world.report_idle(None, "n2")
    world.run_for(500.0)
    assert found(world) == []


def test_idleness_is_no_hang_where_the_job_does_not_ask_for_it() -> None:
    """The attack: agents claim it all the same."""
    world = hanging(hang_after_idle_s=0.0)
    world.report_idle(2**31, *NODES)
    world.run_for(500.0)
    assert found(world) == []


def test_a_declared_phase_is_no_hang_however_idle() -> None:
    world = hanging()
    world.report_phase("n2", "evaluation")
    world.run_for(500.0)
    assert found(world) == []


def test_a_rank_that_has_exited_well_is_not_waited_for() -> None:
    """The others may wait for it for ever."""
    world = hanging()
    world.kill_rank("n0", 0)
    world.run_until(lambda: bool(found(world)), 100.0)
    assert "idle for 40 s" in found(world)[0].reason


def test_each_hang_in_one_place_doubles_the_time_and_the_second_may_end_the_job() -> None:
    world = hanging(max_failures=2)
    world.run_until(lambda: bool(found(world)), 100.0)
    _meet_and_hang(world, 2)
    began = world.now
    world.run_until(lambda: len(found(world)) == 2, 200.0)
    assert 2 * ALLOWED_S < world.now - began < 2.25 * ALLOWED_S + 3.0
    assert "idle for 80 s" in found(world)[1].reason
    world.run_until(lambda: world.gang.phase is Phase.FAILED, 60.0)


def test_observe_mode_reports_the_hang_and_leaves_the_ranks_alone() -> None:
    world = hanging(limits=replace(NO_LIMITS, observe=True))
    world.run_for(500.0)
    assert len(found(world)) == 1
    assert world.gang.newest.generation == 1


def test_a_script_with_steps_hangs_of_idleness_before_its_pace_says_so() -> None:
    world = Scenario(3, 0, hang_after_s=600.0, hang_after_idle_s=ALLOWED_S)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    world.hang_rank("n1")
    world.run_until(lambda: bool(found(world)), 100.0)
    assert "idle for 40 s" in found(world)[0].reason


def test_a_gang_that_makes_steps_does_not_hang() -> None:
    world = Scenario(3, 0, hang_after_s=0.0, hang_after_idle_s=ALLOWED_S)
    world.run_for(500.0)
    assert found(world) == []
