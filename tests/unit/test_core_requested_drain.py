"""Drains that operators request, in simulated worlds."""

from functools import partial

import pytest
from tests.unit import training_worlds
from tests.unit.training_worlds import carrying, spare, verbs

from muster.daemon.coordinator.core.detection.circuit_breaker import MIB
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.services.views import gang_view
from muster.node_health import NodeHealth
from muster.slurm.client.states import NodeState

training = partial(training_worlds.training, spares=1)

REASON = "its fan is loud"


def test_the_ranks_leave_the_node_without_losing_a_step_and_slurm_drains_it() -> None:
    world = training()
    node = carrying(world)[1]
    world.drain(node, REASON)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out) == ("planned swap", [node])
    assert recovery.cause == f"alice drains {node}: {REASON}"
    assert recovery.step_restored == recovery.step_before
    world.run_for(3)
    assert verbs(world) == [("drain", node), ("let_go", node)]
    assert world.slurm[0].text == f"muster: [user] alice: {REASON}"
    assert world.core.state.node(node).health is NodeHealth.FIT
    assert world.replayed_state() == world.core.state


def test_a_gang_without_a_spare_stays_and_leaves_when_a_spare_is_ready() -> None:
    world = training()
    node, waits = carrying(world)[1], spare(world)
    world.pause(waits)
    world.run_until(lambda: waits in world.core.observed.gang("g").suspected_since)
    world.drain(node, REASON)
    world.run_for(1)
    assert world.gang.newest.generation == 1
    world.resume(waits)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == [node]


def test_a_drained_spare_takes_a_seat_only_if_no_other_is_left() -> None:
    world = training(spares=2)
    drained = spare(world)
    world.drain(drained, REASON)
    world.run_for(0.5)
    first, second = carrying(world)[1:3]
    world.crash(first)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert drained not in carrying(world)
    world.crash(second)
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    assert drained in carrying(world)


def test_a_spare_that_an_administrator_drains_takes_a_seat_only_if_no_other_is_left() -> None:
    world = training(spares=2)
    drained, (first, second) = spare(world), carrying(world)[1:3]
    world.drain_by_hand(drained, "a fan")
    world.run_for(6)
    world.crash(first)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert drained not in carrying(world)
    world.run_for(3)
    refusal = world.core.why_no_swap(world.gang, second, world.now)
    assert refusal is not None
    assert f"{drained} (drained in Slurm: a fan)" in refusal.words
    world.crash(second)
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    assert drained in carrying(world)


def test_ranks_leave_a_node_that_an_administrator_sets_to_fail_until_it_is_resumed() -> None:
    world = training(spares=2)
    node = carrying(world)[1]
    world.drain_by_hand(node, "a fan", NodeState.FAIL)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.nodes_out, recovery.step_restored) == ([node], recovery.step_before)
    assert recovery.cause == f"an administrator drains {node}: state FAIL in Slurm, a fan"
    world.run_for(3)
    assert verbs(world) == [("let_go", node)]
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    assert [shown.reason for shown in view.nodes if shown.node == node] == [recovery.cause]
    world.world.cluster.resume(node)
    world.run_for(6)
    assert (world.core.state.node(node).drain, world.core.index.unwanted) == (None, set())


def test_a_fault_meanwhile_leaves_the_node_as_well() -> None:
    world = training(spares=2)
    node, other = carrying(world)[1:3]
    world.drain(node, REASON)
    world.crash(other)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert sorted(world.gang.recovery.recoveries[-1].nodes_out) == sorted([node, other])


def test_a_restarted_coordinator_knows_the_drain() -> None:
    world = training()
    node = carrying(world)[1]
    world.drain(node, REASON)
    world.restart_coordinator()
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].nodes_out == [node]
    assert world.core.index.drained == {node}


def test_a_resumed_node_is_no_longer_drained_and_its_precursor_is_forgotten() -> None:
    world = training(spares=0)
    node = carrying(world)[1]
    world.precursor(node, "record", "Xid 63")
    world.drain(node, REASON)
    world.run_for(5)
    assert world.core.state.node(node).health is NodeHealth.DEGRADED
    world.world.cluster.resume(node)
    world.run_for(5)
    known = world.core.state.node(node)
    assert (known.drain, known.health) == (None, NodeHealth.FIT)
    assert world.core.index.unwanted == set()
    assert world.replayed_state() == world.core.state


def test_a_drain_that_slurm_refuses_is_over() -> None:
    world = training()
    world.drain("n99", REASON)
    world.run_for(5)
    [ended] = world.facts(facts.NodeDrainEnded)
    assert ended.node == "n99"
    assert ended.reason.startswith("Slurm refused: ")
    assert world.core.index.drained == set()


def test_a_second_request_changes_nothing() -> None:
    world = training()
    node = carrying(world)[1]
    world.drain(node, REASON)
    world.drain(node, "again")
    world.run_for(5)
    assert len(world.facts(facts.NodeDrainRequested)) == 1


@pytest.mark.parametrize("limits", [Limits(nodes_per_hour=0), Limits(swaps_per_hour=0)])
def test_limits_on_verdicts_do_not_hold_for_operators(limits: Limits) -> None:
    world = training(limits=limits)
    node = carrying(world)[1]
    world.drain(node, REASON)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.core.state.taken_out_at == {}


def test_in_observe_mode_nothing_is_drained() -> None:
    world = training(limits=Limits(observe=True))
    world.drain(carrying(world)[1], REASON)
    world.run_for(5)
    assert (world.gang.newest.generation, verbs(world)) == (1, [])


def test_an_idle_node_with_a_strong_precursor_is_drained_at_once() -> None:
    world = training(spares=0, idle_nodes=1)
    idle = next(name for name in world.world.machines if name not in world.gang.roster.members)
    world.precursor(idle, "swap", "Xid 48")
    world.run_for(1)
    assert world.core.state.node(idle).health is NodeHealth.UNFIT
    assert verbs(world) == [("drain", idle)]


def test_a_node_with_a_strong_precursor_is_drained_when_its_job_is_over() -> None:
    world = training(spares=0)
    node = carrying(world)[1]
    world.precursor(node, "swap", "Xid 48")
    world.run_for(3)
    assert world.core.state.node(node).health is NodeHealth.DEGRADED
    world.post_event(events.CancelRequested("g", "alice"))
    world.run_for(3)
    assert world.core.state.node(node).health is NodeHealth.UNFIT


def test_limits_protect_idle_nodes() -> None:
    world = training(spares=0, idle_nodes=1, limits=Limits(nodes_per_hour=0))
    idle = next(name for name in world.world.machines if name not in world.gang.roster.members)
    world.precursor(idle, "swap", "Xid 48")
    world.run_for(1)
    assert world.core.state.node(idle).health is NodeHealth.DEGRADED
    assert verbs(world) == []


def test_a_booted_node_is_fit_again() -> None:
    world = training(spares=0)
    node = carrying(world)[1]
    world.precursor(node, "record", "Xid 63")
    world.run_for(0.5)
    known = world.core.state.node(node)
    world.post_event(events.NodeAttached(node, "another boot", "i2", known.probe_address, known.addresses))
    assert world.core.state.node(node).health is NodeHealth.FIT


def test_a_drain_costs_its_jobs_little_of_the_journal() -> None:
    world = training()
    world.drain(carrying(world)[1], REASON)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.account.journal_use.counted_at(world.now) < MIB
