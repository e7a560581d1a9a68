"""Swaps that users request, in simulated worlds."""

from collections.abc import Callable

import pytest
from tests.unit.training_worlds import carrying, spare, training

from muster.daemon.coordinator.core.detection.circuit_breaker import MIB
from muster.daemon.coordinator.core.requested_swap import Refusal
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def request(world: Scenario, node: str, reason: str = "") -> None:
    world.swap(node, reason)


def refusal(world: Scenario, node: str) -> str:
    found = world.core.why_no_swap(world.gang, node, world.now)
    return found.words if found else ""


def test_a_spare_takes_the_place_no_step_is_repeated_and_nothing_is_held_against_the_node() -> None:
    world = training()
    node = carrying(world)[1]
    request(world, node, "its fan is loud")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out) == ("planned swap", [node])
    assert recovery.cause == "asked for by alice: its fan is loud"
    assert recovery.step_restored == recovery.step_before
    assert world.core.state.node(node).health is NodeHealth.FIT
    world.run_for(3)
    assert [(call.verb, call.node) for call in world.slurm] == [("let_go", node)]
    assert world.gang.recovery.failures_in_a_row == 0
    assert world.replayed_state() == world.core.state


def test_the_batch_host_can_be_left_and_stays_in_the_job() -> None:
    world = training()
    request(world, "n0")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.run_for(3)
    assert "n0" not in carrying(world)
    assert world.slurm == []


def test_a_restarted_coordinator_completes_the_swap() -> None:
    world = training()
    node = carrying(world)[1]
    request(world, node)
    world.restart_coordinator()
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == [node]
    assert world.gang.recovery.recoveries[-1].step_restored == world.gang.recovery.recoveries[-1].step_before
    assert world.replayed_state() == world.core.state


@pytest.mark.parametrize("limits", [Limits(nodes_per_hour=0), Limits(swaps_per_hour=0)])
def test_limits_on_verdicts_do_not_hold_for_users(limits: Limits) -> None:
    world = training(limits=limits)
    request(world, carrying(world)[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.phase is Phase.RUNNING


def test_a_job_is_not_stopped_for_swaps_that_were_requested() -> None:
    world = training(spares=3, limits=Limits(swaps_per_hour=1))
    for generation in (2, 3):
        request(world, carrying(world)[1])
        world.run_until(lambda wanted=generation: world.gang.newest.stepped_generation == wanted)  # type: ignore[misc]
        world.run_for(1)
    world.crash(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 4)


def test_a_crash_meanwhile_counts_against_the_software_as_ever() -> None:
    world = training()
    node, other = carrying(world)[1:3]
    request(world, node)
    world.kill_rank(other)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.nodes_out, recovery.hardware) == ([node], False)


def test_if_the_spare_is_gone_the_ranks_start_again_where_they_were() -> None:
    world = training(spares=1)
    before = carrying(world)
    request(world, before[1])
    world.crash(spare(world))
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert carrying(world) == before
    assert before[1] not in world.gang.recovery.recoveries[-1].nodes_out


def test_a_degraded_node_may_be_left_on_request_where_a_limit_protects_it() -> None:
    world = training(limits=Limits(nodes_per_hour=0))
    node = carrying(world)[1]
    world.precursor(node)
    world.run_for(1)
    request(world, node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.core.state.node(node).health is NodeHealth.DEGRADED
    assert node not in carrying(world)


def _while_a_swap_is_under_way(world: Scenario) -> None:
    request(world, carrying(world)[1])


def _while_the_ranks_stop(world: Scenario) -> None:
    world.sigterm()
    world.run_until(lambda: world.gang.plans.stop is not None)


def _while_it_recovers(world: Scenario) -> None:
    world.kill_rank(carrying(world)[1])
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)


def _before_the_next_step(world: Scenario) -> None:
    world.kill_rank(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.generation == 2 and world.gang.phase is Phase.RUNNING)


def _with_a_degraded_spare(world: Scenario) -> None:
    world.precursor(spare(world), "record", "Xid 63")
    world.run_for(0.1)


def _with_a_silent_spare(world: Scenario) -> None:
    world.pause(spare(world))
    world.run_until(lambda: spare(world) in world.core.observed.gang("g").suspected_since)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (_while_a_swap_is_under_way, "a swap is under way: {node} is left"),
        (_while_the_ranks_stop, "the ranks are stopping already: "),
        (_while_it_recovers, "the gang is RECOVERING: a node can be swapped while the gang is RUNNING"),
        (_before_the_next_step, "generation 2 has finished no step yet: try again after its first step"),
        (_with_a_degraded_spare, "no spare is ready to take the place of n0: {spare} (DEGRADED: Xid 63); try again"),
        (_with_a_silent_spare, "no spare is ready to take the place of n0: {spare} (silent); try again"),
    ],
)
def test_a_request_that_can_not_be_carried_out_now_is_refused(happens: Callable[[Scenario], None], words: str) -> None:
    world = training(spares=1)
    node = "n0"
    happens(world)
    planned = len(world.facts(facts.SwapPlanned))
    assert refusal(world, node).startswith(words.format(node=carrying(world)[1], spare=spare(world)))
    request(world, node)
    assert len(world.facts(facts.SwapPlanned)) == planned


def test_a_node_that_can_never_be_left_is_refused_for_good() -> None:
    world = training(spares=1)
    idle = spare(world)
    ranked = " ".join(carrying(world))
    why = world.core.why_no_swap
    assert why(world.gang, "n9", world.now) == Refusal(
        f"n9 is no node of job 1; name one of the nodes that carry its ranks: {ranked}", for_good=True
    )
    assert why(world.gang, idle, world.now) == Refusal(
        f"{idle} carries no rank: it is a spare; name one of the nodes that carry its ranks: {ranked}", for_good=True
    )


def test_a_job_without_spares_is_never_made_smaller() -> None:
    world = training(spares=0, min_nodes=2)
    assert refusal(world, "n1").startswith("the job has no spare that could take the place of n1")
    request(world, "n1")
    world.run_for(5)
    assert (world.gang.newest.generation, len(carrying(world))) == (1, 4)


def test_in_observe_mode_nobody_is_moved() -> None:
    world = training(limits=Limits(observe=True))
    assert "observe mode" in refusal(world, carrying(world)[1])
    request(world, carrying(world)[1])
    world.run_for(5)
    assert world.gang.newest.generation == 1


def test_a_job_that_has_used_up_its_requests_is_moved_no_more() -> None:
    world = training(limits=Limits(journal_mib_per_job=1.0))
    world.gang.account.journal_use.add(MIB, world.now)
    request(world, carrying(world)[1])
    assert world.facts(facts.SwapPlanned) == []
