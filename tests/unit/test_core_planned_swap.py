"""Planned swaps: ranks leave a node that reports a precursor, in simulated worlds."""

import pytest
from tests.unit.training_worlds import carrying, health, training, verbs

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS


def test_the_ranks_leave_the_node_and_repeat_no_step() -> None:
    world = training()
    node = carrying(world)[1]
    world.precursor(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out, recovery.cause) == ("planned swap", [node], "Xid 64")
    assert recovery.step_restored == recovery.step_before
    assert health(world, node) is NodeHealth.UNFIT
    world.run_for(3)
    assert verbs(world) == [("drain", node), ("let_go", node)]
    assert world.gang.plans.swap is None


def test_a_process_that_does_not_exit_delays_nothing() -> None:
    """A script that takes no notice of the answer of `loop.step`, or that cleans up for long."""
    world = training(stop_s=1000.0)
    node = carrying(world)[1]
    world.precursor(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out) == ("planned swap", [node])
    assert recovery.step_restored == recovery.step_before


def test_no_rank_is_killed_before_its_last_step_is_committed() -> None:
    world = training(stop_s=1000.0, copy_s=1.0)
    world.precursor(carrying(world)[1])
    world.run_until(lambda: world.gang.recovery.fenced_generation == 1)
    last = Version(1, world.gang.recovery.recoveries[-1].step_before)
    agents = [agent for (_, node), agent in world.world.agents.items() if node in carrying(world)]
    assert {rank.stopped_step for agent in agents for rank in agent.ranks.values()} == {last.step}
    assert last in {agent.memory.committed for agent in agents}


def test_ranks_that_exit_are_not_waited_for_until_their_last_step_is_committed() -> None:
    """Without a buddy's copy, for example, it never is."""
    world = training(copy_s=1000.0)
    world.precursor(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].action == "planned swap"


def test_a_swap_needs_no_failure_budget() -> None:
    world = training(max_failures=1)
    world.precursor(carrying(world)[0])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.failures_in_a_row == 0


@pytest.mark.parametrize("response", ["record", "flush"])
def test_a_weaker_response_moves_nobody(response: str) -> None:
    world = training(durable_dir="/durable")
    node = carrying(world)[1]
    world.precursor(node, response)
    world.run_for(10)
    assert (health(world, node), world.gang.newest.generation) == (NodeHealth.DEGRADED, 1)
    assert [fact.reason for fact in world.facts(facts.FlushOrdered)] == (
        [f"asked for by the policy, because {node} is DEGRADED"] if response == "flush" else []
    )


def test_without_a_spare_the_state_is_written_once_for_each_node() -> None:
    world = training(spares=0, durable_dir="/durable")
    node = carrying(world)[1]
    world.precursor(node)
    world.run_for(10)
    assert (world.gang.newest.generation, len(world.facts(facts.FlushOrdered))) == (1, 1)
    world.precursor(carrying(world)[2], "flush")
    world.run_for(5)
    assert len(world.facts(facts.FlushOrdered)) == 2


def test_a_spare_with_a_precursor_takes_no_seat() -> None:
    world = training(spares=1)
    spare = next(seat.node for seat in world.gang.roster.spares)
    world.precursor(spare, "record")
    world.precursor(carrying(world)[1])
    world.run_for(10)
    assert (world.gang.newest.generation, world.facts(facts.SwapPlanned)) == (1, [])


@pytest.mark.parametrize("place", [0, 1])
def test_a_degraded_spare_is_the_last_to_take_the_seat_of_a_lost_node(place: int) -> None:
    world = training(spares=2)
    spares = [seat.node for seat in world.gang.roster.spares]
    world.precursor(spares[place], "record")
    world.crash(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.generation == 2)
    assert spares[1 - place] in carrying(world)
    assert spares[place] not in carrying(world)


def test_a_stronger_response_to_a_second_signal_is_carried_out_and_a_weaker_one_is_not() -> None:
    world = training()
    node = carrying(world)[1]
    world.precursor(node, "record", "Xid 63")
    world.run_for(1)
    world.precursor(node, "swap", "Xid 64")
    world.precursor(node, "flush", "Xid 64")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].cause == "Xid 64"
    judged = [fact for fact in world.facts(facts.NodeJudged) if fact.node == node]
    assert [(fact.health, fact.response) for fact in judged] == [
        (NodeHealth.DEGRADED, Response.RECORD),
        (NodeHealth.DEGRADED, Response.SWAP),
        (NodeHealth.UNFIT, Response.RECORD),
    ]


def test_two_nodes_leave_in_one_swap() -> None:
    world = training()
    nodes = carrying(world)[1:3]
    for node in nodes:
        world.precursor(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == sorted(nodes)
    assert len(world.facts(facts.SwapPlanned)) == 1


@pytest.mark.parametrize(
    "limits", [Limits(nodes_per_hour=0), Limits(fraction=0.0, nodes_at_least=0), Limits(swaps_per_hour=0)]
)
def test_no_node_is_left_that_a_limit_protects(limits: Limits) -> None:
    world = training(limits=limits)
    node = carrying(world)[1]
    world.precursor(node)
    world.run_for(10)
    assert (world.gang.newest.generation, verbs(world), health(world, node)) == (1, [], NodeHealth.DEGRADED)


def test_observe_mode_moves_nobody() -> None:
    world = training(limits=Limits(observe=True))
    world.precursor(carrying(world)[1])
    world.run_for(10)
    assert (world.gang.newest.generation, verbs(world)) == (1, [])


def test_a_job_uses_no_more_swaps_than_it_may_and_is_not_stopped_for_them() -> None:
    limits = Limits(**{**{name: getattr(NO_LIMITS, name) for name in Limits.__slots__}, "swaps_per_hour": 1})
    world = training(limits=limits)
    first, second = carrying(world)[1:3]
    world.precursor(first)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.precursor(second)
    world.run_for(10)
    assert (world.gang.newest.generation, world.gang.phase) == (2, Phase.RUNNING)


def test_a_fault_while_the_ranks_leave_is_a_recovery_that_leaves_the_node_too() -> None:
    world = training()
    node, dead = carrying(world)[1:3]
    world.precursor(node)
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.crash(dead)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert sorted(world.gang.recovery.recoveries[-1].nodes_out) == sorted([node, dead])


def test_a_recovery_keeps_a_degraded_node_if_the_spare_is_needed_elsewhere() -> None:
    world = training(spares=1)
    node, dead = carrying(world)[1:3]
    world.precursor(node)
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.crash(dead)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == [dead]
    assert health(world, node) is NodeHealth.DEGRADED


def test_a_planned_stop_comes_first() -> None:
    world = training(durable_dir="/durable")
    world.precursor(carrying(world)[1])
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.newest.generation == 1


def test_a_restarted_coordinator_completes_the_swap() -> None:
    world = training()
    node = carrying(world)[1]
    world.precursor(node)
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.restart_coordinator()
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == [node]
    assert world.gang.recovery.recoveries[-1].step_restored == world.gang.recovery.recoveries[-1].step_before
    assert world.replayed_state() == world.core.state


def test_a_job_that_ends_at_the_same_time_is_done() -> None:
    world = training()
    world.precursor(carrying(world)[1])
    world.run_until(lambda: world.gang.plans.swap is not None)
    world.world.final_steps["g"] = 0
    world.run_until(lambda: world.gang.final)
    assert world.gang.phase is Phase.DONE


def test_a_job_starts_without_its_degraded_nodes() -> None:
    world = Scenario(3, 2)
    for node in ("n0", "n1"):
        world.precursor(node, "record")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    assert sorted(carrying(world)) == ["n2", "n3", "n4"]
