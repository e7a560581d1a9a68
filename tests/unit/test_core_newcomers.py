"""One node carries all ranks, and another one joins. The first is a majority of its gang until it has heard of the
newcomer, so what only the newcomer finds proves nothing about the end of the ranks."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.agent import Agent

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


def with_late_spare(relaunched: bool = False) -> Scenario:
    """One node trains, and the agent of its spare started later. `relaunched`: it was just started once more."""
    world = Scenario(1, 1, absent=["n1"])
    world.run_until(lambda: world.gang.newest.stepped_generation == 1, 300.0)
    identity = replace(world.agent("n0").identity, on_batch_host=False, incarnation="late")
    world.world.add_agent(Agent(world.world, world.machines["n1"], identity))
    world.run_until(lambda: known(world))
    if relaunched:
        world.relaunch_agents("n1")
        world.run_until(lambda: world.gang.roster.members["n1"].incarnation == "late-again")
    return world


def joined(world: Scenario) -> bool:
    return "n1" in world.gang.roster.members and not world.gang.roster.members["n1"].removed


def known(world: Scenario) -> bool:
    return joined(world) and not world.gang.roster.members["n1"].newcomer


def isolate(world: Scenario, *others: str) -> None:
    """No message passes between n0 and the others."""
    world.cut(*[pair for other in others for pair in (("n0", other), (other, "n0"))])


def is_lost_and_ends_its_ranks(world: Scenario) -> None:
    """The simulated cluster raises an error if the next generation starts before the ranks have ended."""
    world.run_until(lambda: world.core.state.node("n0").health is NodeHealth.LOST, 5.0)
    world.run_until(lambda: not world.agent("n0").ranks[0].alive, 2.5)
    world.run_for(5.0)


def test_a_node_that_trains_alone_is_not_lost_on_the_word_of_a_newcomer() -> None:
    world = training_alone(JOINS_LATE_S)
    isolate(world, "coordinator", "n1")
    world.run_until(lambda: joined(world))
    world.run_for(20.0)
    assert world.agent("n0").ranks[0].alive
    assert world.core.state.node("n0").health is NodeHealth.FIT
    assert world.gang.newest.generation == 1


def test_a_node_that_trains_alone_is_not_removed_because_a_newcomer_alone_reaches_it() -> None:
    world = training_alone(JOINS_LATE_S)
    world.world.slurmd_connected.add("n0")
    isolate(world, "coordinator")
    world.run_until(lambda: joined(world))
    world.run_for(400.0)
    assert world.agent("n0").ranks[0].alive
    assert world.gang.newest.generation == 1


def test_slurm_decides_if_a_newcomer_alone_finds_the_node_silent() -> None:
    world = training_alone(JOINS_LATE_S)
    world.power_off("n0")
    world.run_until(lambda: world.gang.roster.members["n0"].removed, 60.0)
    assert "Slurm has taken it out of the job" in world.gang.roster.members["n0"].removal_reason


def test_a_newcomer_that_becomes_known_once_the_cut_is_over_is_a_witness() -> None:
    world = training_alone(JOINS_LATE_S)
    isolate(world, "coordinator", "n1")
    world.run_until(lambda: joined(world))
    assert not known(world)
    world.heal(("n0", "coordinator"), ("coordinator", "n0"), ("n0", "n1"), ("n1", "n0"))
    world.run_until(lambda: known(world), 20.0)
    isolate(world, "coordinator", "n1")
    is_lost_and_ends_its_ranks(world)


@pytest.mark.parametrize("begin", [lambda: training_alone(0.1), with_late_spare, lambda: with_late_spare(True)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_newcomer_that_the_node_knows_is_a_witness(begin: Callable[[], Scenario], restarts: bool) -> None:
    """Also after a restart of the coordinator to which the node does not attach any more."""
    world = begin()
    world.run_until(lambda: known(world))
    if restarts:
        world.restart_coordinator()
    isolate(world, "coordinator", "n1")
    is_lost_and_ends_its_ranks(world)


def test_a_spare_that_comes_back_is_a_newcomer_until_its_node_knows_it() -> None:
    world = training_alone(0.1)
    assert not world.gang.roster.members["n1"].newcomer
    world.run_until(lambda: joined(world))
    assert not known(world)
    world.run_until(lambda: known(world), 1.0)
    assert world.facts(facts.NewcomerKnown) == [facts.NewcomerKnown("g", "n1")]


def test_everybody_knows_the_members_with_which_a_generation_starts() -> None:
    world = training_alone(JOINS_LATE_S)
    isolate(world, "coordinator", "n1")
    world.run_until(lambda: joined(world))
    state, [started] = world.replayed_state(), world.facts(facts.GenerationStarted)
    newcomer = state.gangs["g"].roster.members["n1"]
    assert newcomer.newcomer
    apply(state, facts.GenerationFenced("g", 1, "a rank failed", False, "n0", 1, world.now), world.now)
    assert newcomer.newcomer
    apply(state, replace(started, generation=2), world.now)
    assert not newcomer.newcomer


def test_of_several_nodes_with_ranks_each_knows_the_others() -> None:
    world = Scenario(2, 1)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    [spare] = (seat.node for seat in world.gang.roster.spares)
    world.relaunch_agents(spare)
    assert not any(member.newcomer for member in world.replayed_state().gangs["g"].roster.members.values())


def test_the_silence_of_an_agent_that_comes_back_counts_from_its_return() -> None:
    """As in the real agent, whose link to a node begins when its order lists the node."""
    world = training_alone(JOINS_LATE_S)
    world.cut(("n0", "n1"), ("n1", "n0"))
    world.run_until(lambda: joined(world))
    at = world.now
    world.run_until(lambda: known(world), 1.0)
    assert world.agent("n0").peer_monitor.last_contact("n1") >= at
