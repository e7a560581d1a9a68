"""A member that has joined since a node was last heard: the node does not count it, so it proves nothing about the end
of the node's ranks."""

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import AgentStatus, Silence
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario

JOINS_LATE_S = 5.0
"""Seconds until the agent of a new job attaches: longer than the ranks of a silent node may live."""


def training_alone(launch_s: float) -> Scenario:
    """One node trains. The spare was repaired, and its agent is about to come back with a job of its own."""
    world = Scenario(1, 1, launch_s=launch_s)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    world.signal("n1")
    world.run_until(lambda: world.core.state.node("n1").health is NodeHealth.UNFIT)
    world.run_until(lambda: world.world.cluster.nodes()["n1"].drained)
    world.repair("n1")
    world.run_until(lambda: world.facts(facts.PoolJobQueued) != [])
    return world


def joined(world: Scenario) -> bool:
    return not world.gang.roster.members["n1"].removed


def cut_off(world: Scenario, *others: str) -> None:
    """No message passes between n0 and the others."""
    world.cut(*[pair for other in others for pair in (("n0", other), (other, "n0"))])


def test_a_node_that_trains_alone_is_not_lost_on_the_word_of_a_newcomer() -> None:
    world = training_alone(JOINS_LATE_S)
    cut_off(world, "coordinator", "n1")
    world.run_until(lambda: joined(world))
    world.run_for(20.0)
    assert world.agent("n0").ranks[0].alive
    assert world.core.state.node("n0").health is NodeHealth.FIT
    assert world.gang.newest.generation == 1


def test_a_node_that_trains_alone_is_not_removed_because_a_newcomer_alone_reaches_it() -> None:
    world = training_alone(JOINS_LATE_S)
    world.world.slurmd_connected.add("n0")
    cut_off(world, "coordinator")
    world.run_until(lambda: joined(world))
    world.run_for(400.0)
    assert world.agent("n0").ranks[0].alive
    assert world.gang.newest.generation == 1


def test_a_newcomer_that_the_node_knows_is_a_witness() -> None:
    world = training_alone(launch_s=0.1)
    world.run_until(lambda: joined(world))
    world.run_for(2.0)
    world.power_off("n0")
    world.run_until(lambda: world.core.state.node("n0").health is NodeHealth.LOST, 20.0)


@pytest.mark.parametrize(("order_serial", "asked"), [(0, {"n1", "n2"}), (1000, {"n1", "n7"})])
def test_a_newcomer_that_the_node_does_not_know_is_asked_last(order_serial: int, asked: set[str]) -> None:
    world = Scenario(3, 0)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    state, now = world.replayed_state(), world.now
    # It shares less with n0 than n2 does, which is in the same leaf.
    apply(state, facts.MemberJoined("g", "n7", 1, "i", "n7:9", False, "s7"), now)
    core = Core(state, now)
    for member in state.gangs["g"].roster.members.values():
        status = AgentStatus(order_serial=order_serial)
        core.decide(
            events.AgentAttached(
                "g", member.node, 1, 0, member.incarnation, member.peer_address, member.batch_host, member.leaf, status
            ),
            now,
        )
    [probe] = core.decide(events.PeerAccused("g", "n1", "n0", Silence.NO_ANSWER), now).probe_requests
    assert set(probe.witnesses) == {"agent", "musterd", *asked}
