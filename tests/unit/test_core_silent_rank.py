"""One rank sends no signs of life: no Python thread of it runs. When it is named, and when nobody is."""

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import AgentStatus, RankState
from muster.daemon.coordinator.core.state.step_pace import StepPace
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS


def training(nodes: int = 4, spares: int = 1, *, hang_after_s: float = 60.0, **more: object) -> Scenario:
    world = Scenario(nodes, spares, hang_after_s=hang_after_s, **more)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    return world


def found(world: Scenario) -> list[facts.HangDetected]:
    return world.facts(facts.HangDetected)


def recovered(world: Scenario, generation: int = 2) -> Callable[[], bool]:
    return lambda: world.gang.newest.stepped_generation == generation


def test_a_rank_in_which_no_python_runs_is_named_within_ten_seconds() -> None:
    world = training()
    before, began = [seat.node for seat in world.gang.roster.seats], world.now
    world.hang_rank("n2", "silent")
    world.run_until(lambda: bool(found(world)), 100.0)
    assert 7.0 < world.now - began < 10.0
    (hang,) = found(world)
    assert hang.node == "n2"
    assert "; rank 1 on n2 has run no Python for 8 s or more, all others do" in hang.reason
    world.run_until(recovered(world), 10.0)
    assert [seat.node for seat in world.gang.roster.seats] == before
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())


def test_ranks_that_answer_and_hang_have_the_whole_time_as_before() -> None:
    world = training()
    world.hang_rank("n2")
    world.run_for(59.0)
    assert found(world) == []


def test_nobody_is_named_while_any_rank_is_in_a_declared_phase() -> None:
    world = training()
    world.report_phase("n1", "evaluation")
    world.hang_rank("n2", "silent")
    world.run_for(500.0)
    assert found(world) == []


def test_a_silence_in_a_declared_phase_counts_from_the_end_of_the_phase() -> None:
    world = training()
    world.report_phase("n2", "evaluation")
    world.hang_rank("n2", "silent")
    world.run_for(100.0)
    world.report_phase("n2", "")
    ended = world.now
    world.run_until(lambda: bool(found(world)), 100.0)
    assert 7.0 < world.now - ended < 10.0


def test_of_two_silent_ranks_none_is_named() -> None:
    """The processors of a node, or the machine, may be overloaded."""
    world = training()
    world.hang_rank("n2", "silent")
    world.hang_rank("n1", "silent")
    world.run_until(lambda: bool(found(world)), 100.0)
    (hang,) = found(world)
    assert hang.node == ""
    assert "no Python" not in hang.reason
    assert world.now - hang.suspected_at > 60.0


def test_nobody_is_named_where_another_rank_sends_no_signs_of_life_at_all() -> None:
    """It may be as silent, and nobody would know."""
    world = training()
    world.agent("n1").silences.forget(next(iter(world.agent("n1").ranks)))
    world.hang_rank("n2", "silent")
    world.run_for(59.0)
    assert found(world) == []


def test_a_gang_of_one_rank_has_no_others_that_would_answer() -> None:
    world = training(nodes=1, spares=0)
    world.hang_rank("n0", "silent")
    world.run_for(59.0)
    assert found(world) == []


def test_a_rank_is_not_named_before_its_generation_has_finished_a_step() -> None:
    world = Scenario(2, 0, hang_after_s=60.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6)
    world.kill_rank("n1")
    world.run_until(lambda: _joined(world, 2), 60.0)
    world.hang_rank("n1", "silent")
    world.run_for(100.0)
    assert found(world) == []


def _joined(world: Scenario, generation: int) -> bool:
    newest = world.world.newest_training("g")
    return newest is not None and newest.generation == generation and newest.began


def test_no_rank_is_named_where_the_job_has_switched_hangs_off() -> None:
    world = training(hang_after_s=0.0)
    world.hang_rank("n2", "silent")
    world.run_for(500.0)
    assert found(world) == []


def test_a_job_that_allows_longer_pauses_allows_longer_silences() -> None:
    world = training(hang_after_s=240.0)
    began = world.now
    world.hang_rank("n2", "silent")
    world.run_until(lambda: bool(found(world)), 100.0)
    assert 31.0 < world.now - began < 35.0


def test_a_rank_that_is_silent_while_long_steps_are_finished_is_left_alone() -> None:
    world = Scenario(4, 1, hang_after_s=60.0, step_s=30.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6, 900.0)
    world.hang_rank("n2", "silent")
    world.run_for(25.0)
    world.end_silence("n2")
    world.run_for(100.0)
    assert found(world) == []


def test_a_long_call_that_nobody_declared_costs_one_restart_and_no_second_one() -> None:
    """After a failure the same place has the whole time, and what ended there by itself is learned."""
    world = training(copy_s=1.5)
    observed = world.core.observed.gang("g")
    world.kill_rank("n1")
    world.run_until(lambda: observed.last_step[0] == 2, 60.0)
    assert observed.step_number <= world.gang.recovery.furthest_step, (
        "the generation has come no further than the one before"
    )
    world.hang_rank("n2", "silent")
    world.run_for(20.0)
    world.end_silence("n2")
    world.run_until(lambda: observed.step_number > world.gang.recovery.furthest_step + 3, 60.0)
    world.hang_rank("n2", "silent")
    world.run_for(25.0)
    world.end_silence("n2")
    world.run_for(5.0)
    assert found(world) == []
    world.hang_rank("n2", "silent")
    world.run_until(lambda: bool(found(world)), 100.0)
    assert "rank 1 on n2 has run no Python for 32 s or more" in found(world)[0].reason


def test_a_node_that_stood_still_has_no_silent_ranks() -> None:
    world = training()
    world.pause("n2")
    world.run_for(3.0)
    world.resume("n2")
    world.run_for(10.0)
    assert world.agent("n2").silences.reported() == {1: 0}
    assert found(world) == []


def test_a_coordinator_that_does_not_know_the_pace_names_nobody_soon() -> None:
    world = training()
    world.hang_rank("n2", "silent")
    world.restart_coordinator()
    world.run_for(59.0)
    assert found(world) == []


def test_a_node_on_which_ranks_fall_silent_twice_is_replaced() -> None:
    world = training(spares=2, limits=NO_LIMITS)
    world.hang_rank("n2", "silent")
    world.run_until(lambda: _joined(world, 2), 60.0)
    world.hang_rank("n2", "silent")
    world.run_until(recovered(world, 3), 400.0)
    assert [fact.node for fact in found(world)] == ["n2", "n2"]
    assert "n2" not in {seat.node for seat in world.gang.roster.seats}
    step = world.gang.recovery.furthest_step
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 3)
    assert world.core.state.node("n2").health is NodeHealth.FIT
    assert [call.verb for call in world.slurm] == ["let_go"]


def status(silent_s: int | None, exit_code: int | None = None) -> AgentStatus:
    return AgentStatus(ranks=(RankState(0, 1, running=exit_code is None, exit_code=exit_code, silent_s=silent_s),))


@pytest.mark.parametrize(
    ("before", "after", "below_s"),
    [
        (status(8), status(0), 16),
        (status(8), status(16), 0),
        (status(8), status(8, -9), 0),  # its end says nothing about how long it would have been
        (status(8), status(None), 0),
        (status(0), status(0), 0),
        (status(None), status(0), 0),
    ],
)
def test_a_silence_that_ended_by_itself_is_learned(before: AgentStatus, after: AgentStatus, below_s: int) -> None:
    pace = StepPace()
    pace.note_status(before, after, 1.0)
    assert pace.silences_below_s == below_s
