"""Hangs: all agents answer and no rank finishes a step. When this is a hang, when it is not, and what follows."""

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import AgentStatus, RankState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
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


def hang_again(world: Scenario, generation: int, node: str, how: str = "") -> None:
    """The ranks of that generation meet. One rank hangs before any has made a step."""
    world.run_until(lambda: met(world, generation), 900.0)
    world.hang_rank(node, how)


def met(world: Scenario, generation: int) -> bool:
    newest = world.world.newest_training("g")
    return newest is not None and newest.generation == generation and newest.began


def recovered(world: Scenario, generation: int = 2) -> Callable[[], bool]:
    return lambda: world.gang.newest.stepped_generation == generation


def test_a_hang_ends_after_a_minute_in_place_with_stacks_and_blames_no_node() -> None:
    world = training()
    before, step, began = (
        [s.node for s in world.gang.roster.seats],
        world.core.observed.gang("g").step_number,
        world.now,
    )
    world.hang_rank("n2")
    world.run_until(recovered(world), 100.0)
    assert 60.0 < world.now - began < 65.0
    assert [s.node for s in world.gang.roster.seats] == before
    assert [world.agent(node).stacks_generation for node in before] == [1] * 4
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert world.gang.recovery.recoveries[-1].cause == (
        "hang: no rank has finished a step for 61 s, and every agent answers"
    )
    assert world.gang.restore.restored_version is not None
    assert world.gang.restore.restored_version.step >= step - 1
    assert world.gang.recovery.failures_in_a_row == 1
    assert world.slurm == []
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())


def test_no_hang_while_one_rank_is_in_a_declared_phase_and_the_timeout_starts_after_it() -> None:
    world = training()
    world.hang_rank("n1")
    world.report_phase("n2", "evaluation")
    world.run_for(500.0)
    assert found(world) == []
    world.report_phase("n2", "")
    ended = world.now
    world.run_until(lambda: bool(found(world)), 100.0)
    assert 60.0 < world.now - ended < 63.0


def test_training_that_rests_in_a_declared_phase_goes_on() -> None:
    world = training()
    world.declared_phase("300")
    world.run_for(310.0)
    assert found(world) == []
    assert world.gang.newest.generation == 1


def test_a_script_that_has_never_declared_a_step_is_left_alone() -> None:
    world = Scenario(2, 0, hang_after_s=60.0)
    hang_again(world, 1, "n1")
    world.run_for(3000.0)
    assert found(world) == []


def test_no_hang_is_detected_where_the_job_has_switched_it_off() -> None:
    world = training(hang_after_s=0.0)
    world.hang_rank("n1")
    world.run_for(3000.0)
    assert found(world) == []


def test_a_generation_without_a_first_step_hangs_if_an_earlier_one_made_steps() -> None:
    world = training()
    world.kill_rank("n2")
    hang_again(world, 2, "n1")
    began = world.now
    world.run_until(lambda: bool(found(world)), 400.0)
    assert 118.0 < world.now - began < 123.0  # a generation before it has failed here: twice as long


def test_each_hang_in_one_place_doubles_the_timeout_and_the_third_ends_the_job() -> None:
    world = training(max_failures=3)
    world.hang_rank("n1")
    for generation in (2, 3):
        hang_again(world, generation, "n1")
    world.run_until(lambda: world.gang.final, 900.0)
    waits = [at - fact.suspected_at for at, fact in world.journal if isinstance(fact, facts.HangDetected)]
    assert [round(wait) for wait in waits] == [61, 121, 241]
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 93)
    assert [call.verb for call in world.slurm] == ["requeue_off"]


def test_progress_resets_the_timeout() -> None:
    world = training(max_failures=9)
    world.hang_rank("n1")
    world.run_until(recovered(world), 100.0)
    world.run_for(10.0)
    world.hang_rank("n1")
    world.run_until(lambda: len(found(world)) == 2, 100.0)


def test_no_generation_hangs_while_an_agent_does_not_answer() -> None:
    world = training(nodes=2, spares=0)
    world.hang_rank("n1")
    world.run_for(59.5)
    world.world.set_stopped(world.agent("n1"), True)
    world.run_for(1.2)
    stall = world.core.observed.gang("g").stall
    assert stall is not None
    assert stall.unanswered == {"n1"}
    world.world.set_stopped(world.agent("n1"), False)
    world.run_for(0.5)
    assert found(world) == []
    world.run_until(lambda: bool(found(world)), 2.0)


def test_no_generation_hangs_while_an_agent_that_answers_has_no_stream() -> None:
    """It may have steps to report."""
    world = training()
    world.hang_rank("n2")
    world.run_for(59.5)
    world.post_event(events.AgentDisconnected("g", "n1", world.gang.roster.members["n1"].incarnation))
    world.run_for(4.0)
    assert "n1" not in world.core.observed.gang("g").suspected_since
    assert found(world) == []


def test_steps_reported_late_by_an_agent_that_stood_still_are_no_hang() -> None:
    world = training(nodes=1, spares=0, hang_after_s=5.0)
    for _ in range(4):
        world.world.set_stopped(world.agent("n0"), True)
        world.run_for(9.0)
        world.world.set_stopped(world.agent("n0"), False)
        world.run_for(3.0)
    assert found(world) == []


def test_after_a_restart_of_the_coordinator_the_timeout_starts_again_without_a_known_pace() -> None:
    world = training()
    world.hang_rank("n1")
    world.run_for(50.0)
    world.restart_coordinator()
    step, began = world.gang.newest.generation, world.now
    world.run_until(lambda: bool(found(world)), 900.0)
    assert 600.0 < world.now - began < 610.0
    assert world.gang.newest.generation == step


def test_the_coordinators_absence_does_not_count_as_the_duration_of_a_first_step() -> None:
    world = Scenario(2, 0, hang_after_s=60.0)
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    world.world.coordinator_restart_s = 600.0
    world.world.crash_coordinator("as the script says")
    world.run_for(650.0)
    assert world.gang.newest.stepped_generation == 1
    assert world.gang.newest.first_step_s == 0.0
    world.kill_rank("n1")
    world.run_until(recovered(world), 20.0)
    assert 0.0 < world.gang.newest.first_step_s < 10.0


def test_a_coordinator_that_restarts_during_a_hang_still_fences() -> None:
    world = training()
    step = world.core.observed.gang("g").step_number
    world.hang_rank("n1")
    world.run_until(lambda: bool(found(world)), 100.0)
    world.restart_coordinator()
    world.run_until(recovered(world), 10.0)
    assert world.gang.recovery.recoveries[-1].step_before == step
    assert world.replayed_state() == world.core.state


def test_a_fence_waits_two_seconds_at_most_for_stacks() -> None:
    world = training()
    world.agent("n2").stacks_requested = 99  # it never will
    world.hang_rank("n1")
    world.run_until(lambda: bool(found(world)), 100.0)
    at = world.now
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    assert 1.9 < world.now - at < 2.1


def test_observe_mode_reports_a_hang_keeps_stacks_and_leaves_the_ranks_alone() -> None:
    world = training(limits=Limits(observe=True))
    world.hang_rank("n1")
    world.run_for(300.0)
    assert [fact.reason.partition("; ")[2] for fact in found(world)] == [
        "observe mode: the ranks would be restarted in place"
    ]
    assert world.agent("n2").stacks_generation == 1
    assert world.gang.phase is Phase.RUNNING


@pytest.mark.parametrize("how", ["stop", "an end"])
def test_no_hang_is_looked_for_in_ranks_that_are_asked_to_stop(how: str) -> None:
    world = training()
    world.hang_rank("n1")
    if how == "stop":
        world.run_for(50.0)  # the timeout would end before the ranks are ended for not having stopped
        world.sigterm()
        world.run_until(lambda: world.gang.plans.stop is not None)
    else:
        world.kill_rank("n2", 0)
    world.run_for(200.0)
    assert found(world) == []


def test_the_node_whose_ranks_are_behind_twice_is_replaced() -> None:
    world = training(spares=2, limits=NO_LIMITS)
    world.hang_rank("n2", "behind")
    hang_again(world, 2, "n2", "behind")
    world.run_until(recovered(world, 3), 400.0)
    assert [fact.node for fact in found(world)] == ["n2", "n2"]
    assert "the ranks on n2 are a step behind all others" in found(world)[0].reason
    assert "n2" not in {seat.node for seat in world.gang.roster.seats}


def test_a_node_whose_ranks_were_only_slow_is_swapped_and_not_blamed() -> None:
    """Progress elsewhere proves nothing: each hang doubles the timeout, so a long pause now fits into it."""
    world = training(spares=2, limits=NO_LIMITS)
    world.hang_rank("n2", "behind")
    hang_again(world, 2, "n2", "behind")
    world.run_until(recovered(world, 3), 400.0)
    step = world.gang.recovery.furthest_step
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 3)
    assert "n2" not in {seat.node for seat in world.gang.roster.seats}
    assert world.core.state.node("n2").health is NodeHealth.FIT
    assert [call.verb for call in world.slurm] == ["let_go"]


def test_no_node_is_swapped_where_none_is_behind() -> None:
    world = training(max_failures=9)
    world.hang_rank("n2")
    hang_again(world, 2, "n2")
    world.run_until(recovered(world, 3), 400.0)
    assert [fact.node for fact in found(world)] == ["", ""]
    assert "n2" in {seat.node for seat in world.gang.roster.seats}


def test_a_hang_while_agents_miss_each_other_does_not_count_against_the_software() -> None:
    world = training(nodes=2, spares=0)
    world.cut(("n0", "n1"), ("n1", "n0"))
    world.run_until(lambda: bool(world.gang.recovery.recoveries), 200.0)
    assert world.gang.recovery.recoveries[-1].cause.startswith("hang")
    assert world.gang.recovery.recoveries[-1].hardware
    assert world.gang.recovery.failures_in_a_row == 0


def test_once_some_ranks_have_exited_the_others_have_ten_times_as_long() -> None:
    world = training()
    for node in ("n0", "n2", "n4"):
        world.hang_rank(node)
    world.kill_rank("n1", 0)
    began = world.now
    world.run_for(590.0)
    assert found(world) == []
    world.run_until(recovered(world), 60.0)
    assert world.now - began < 620.0


def test_a_spare_that_dies_while_all_are_probed_is_not_awaited_after_its_removal() -> None:
    world = training()
    (spare,) = [seat.node for seat in world.gang.roster.spares]
    world.hang_rank("n2")
    world.run_for(59.9)
    world.power_off(spare)
    world.run_until(lambda: world.core.observed.gang("g").stall is not None, 10.0)
    world.run_until(recovered(world), 30.0)
    assert world.gang.roster.members[spare].removal_reason


# -- who hangs, and who waits --


def test_the_only_rank_that_does_not_wait_for_others_is_named_from_its_stacks() -> None:
    world = training()
    world.hang_rank("n2")
    world.show_elsewhere("n2")
    world.run_until(recovered(world), 100.0)
    last = world.gang.recovery.recoveries[-1]
    assert last.crashed_on == "n2"
    assert last.cause.endswith("; rank 1 on n2 was in read (loader.py:33) while all others waited for other ranks")


@pytest.mark.parametrize("elsewhere", [(), ("n1", "n2")])
def test_nobody_is_named_if_no_rank_or_several_ranks_do_not_wait_for_others(elsewhere: tuple[str, ...]) -> None:
    world = training()
    world.hang_rank("n2")
    world.show_elsewhere(*elsewhere)
    world.run_until(recovered(world), 100.0)
    assert world.gang.recovery.recoveries[-1].crashed_on == ""


def test_nobody_is_named_if_the_stacks_of_one_rank_do_not_show_where_it_is() -> None:
    world = training()
    world.hang_rank("n2")
    world.show_elsewhere("n2")
    next(iter(world.agent("n1").ranks.values())).hang_place = None
    world.run_until(recovered(world), 100.0)
    assert world.gang.recovery.recoveries[-1].crashed_on == ""


def test_the_only_rank_that_has_entered_fewer_collectives_is_named() -> None:
    """On GPUs all main threads wait for their GPU, so that stacks tell nothing."""
    world = training()
    world.hang_rank("n2")
    world.show_elsewhere("n0", "n1", "n2", "n3", "n4")
    world.count_collectives(812, 811, 812, 814)
    world.run_until(recovered(world), 100.0)
    last = world.gang.recovery.recoveries[-1]
    assert last.crashed_on == "n2"
    assert last.cause.endswith("; rank 1 on n2 has entered 811 collectives, all others 812 or more")


@pytest.mark.parametrize(
    "numbers",
    [(812, 812, 812, 812), (811, 811, 812, 812), (812, 811, 812, None), (813, 812, 812, 812)],
    ids=["all equal", "two behind", "one does not count", "one ahead"],
)
def test_nobody_is_named_if_the_collectives_do_not_single_one_rank_out(numbers: tuple[int | None, ...]) -> None:
    world = training()
    world.hang_rank("n2")
    world.count_collectives(*numbers)
    world.run_until(recovered(world), 100.0)
    assert world.gang.recovery.recoveries[-1].crashed_on == ""


def test_what_the_stacks_show_goes_before_what_the_collectives_show() -> None:
    world = training()
    world.hang_rank("n2")
    world.show_elsewhere("n2")
    world.count_collectives(9, 10, 10, 10)
    world.run_until(recovered(world), 100.0)
    assert world.gang.recovery.recoveries[-1].crashed_on == "n2"


def test_a_node_whose_ranks_are_behind_is_named_whatever_the_stacks_show() -> None:
    world = training()
    world.hang_rank("n2", "behind")
    world.show_elsewhere("n1")
    world.run_until(recovered(world), 100.0)
    assert world.gang.recovery.recoveries[-1].crashed_on == "n2"


def test_a_node_whose_rank_hangs_elsewhere_twice_is_replaced() -> None:
    world = training(spares=2, limits=NO_LIMITS)
    world.hang_rank("n2")
    world.show_elsewhere("n2")
    hang_again(world, 2, "n2")
    world.show_elsewhere("n2")
    world.run_until(recovered(world, 3), 400.0)
    assert "n2" not in {seat.node for seat in world.gang.roster.seats}
    step = world.gang.recovery.furthest_step
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 3)
    assert world.core.state.node("n2").health is NodeHealth.FIT
    assert [call.verb for call in world.slurm] == ["let_go"]


# -- the pace --


def status(step: int, declared: str = "") -> AgentStatus:
    return AgentStatus(ranks=(RankState(0, 1, running=True, step=step, progressed=step > 0, declared=declared),))


def test_the_median_is_known_after_three_steps_and_tolerates_an_outlier() -> None:
    pace = StepPace()
    for number, at in enumerate((10.0, 12.0, 14.0), 1):
        pace.note_step((1, number - 1), (1, number), at)
    assert pace.median_step_s == 0.0
    pace.note_step((1, 3), (1, 4), 114.0)
    assert (pace.median_step_s, pace.longest_gap_s) == (2.0, 100.0)
    pace.note_step((1, 4), (1, 14), 134.0)  # ten at once
    assert (pace.median_step_s, pace.longest_gap_s) == (2.0, 100.0)


def test_time_between_generations_or_in_a_declared_phase_is_no_step() -> None:
    pace = StepPace()
    pace.note_step((0, 0), (1, 1), 10.0)
    pace.note_step((1, 1), (2, 1), 100.0)
    pace.note_status(status(1), status(1, "evaluation"), 101.0)
    pace.note_status(status(1, "evaluation"), status(1), 201.0)
    assert pace.progressed_at == 201.0
    pace.note_step((2, 1), (2, 2), 202.0)
    assert pace.longest_gap_s == 0.0
    pace.note_step((2, 2), (2, 3), 203.0)
    assert pace.longest_gap_s == 1.0


def test_progress_of_any_rank_is_a_sign_of_life() -> None:
    pace = StepPace()
    pace.note_status(status(3), status(3), 5.0)
    assert pace.progressed_at == 0.0
    pace.note_status(status(3), status(4), 6.0)
    assert pace.progressed_at == 6.0
