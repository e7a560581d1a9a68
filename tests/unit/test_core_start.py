"""What a start waits for after a fence: the rendezvous store, and memory that may still return."""

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection.failure_detector import REATTACH_S
from muster.daemon.coordinator.core.recovery.recovering import STORE_TIMEOUT_S
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import AgentStatus, RankState, Shard, Silence, Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenario import Scenario

RESTART_S = 5000.0
"""When the coordinator starts again: every agent has lost its stream by then."""


def training() -> Scenario:
    """Ranks on n0 and n2; n1 is a spare."""
    world = Scenario(2, 1)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    return world


# -- memory --


def fenced_again(world: Scenario, fault: str) -> Core:
    """The fault ends generation 1 on n2, and a rank of generation 2 crashes. Then the coordinator starts again."""
    getattr(world, fault)("n2")
    world.run_until(lambda: world.is_running(2))
    world.kill_rank("n0")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    return Core(world.replayed_state(), RESTART_S)


def attaches(core: Core, node: str, now: float, *shards: Shard, opens: bool = True) -> list[facts.GenerationStarted]:
    """The agent attaches: its ranks have ended, and it `opens` the store if it is asked to. Returns the start."""
    gang = core.state.gangs["g"]
    one = gang.roster.members[node]
    status = AgentStatus(
        fenced_generation=gang.recovery.fenced_generation,
        store_port=4000 if opens and node == gang.recovery.next_store_node else 0,
        store_generation=gang.recovery.fenced_generation + 1,
        shards=shards,
    )
    event = events.AgentAttached("g", node, 1, 0, one.incarnation, "a:1", one.batch_host, one.leaf, status)
    return [fact for fact in core.decide(event, now).facts if isinstance(fact, facts.GenerationStarted)]


def members_attach(core: Core, now: float) -> list[facts.GenerationStarted]:
    """Every agent attaches that may carry ranks. Returns the start."""
    return [start for member in core.state.gangs["g"].roster.present() for start in attaches(core, member.node, now)]


def test_after_a_restart_the_only_copy_on_a_removed_node_is_waited_for() -> None:
    core = fenced_again(training(), "signal")
    assert members_attach(core, RESTART_S + 1.0) == []
    shards = [Shard(rank, Version(1, 1), True, "digest") for rank in (0, 1)]
    (start,) = attaches(core, "n2", RESTART_S + 2.0, *shards)
    assert start.version == Version(1, 1)


def test_a_removed_node_is_waited_for_as_long_as_an_agent_needs_to_attach_again() -> None:
    core = fenced_again(training(), "signal")
    assert members_attach(core, RESTART_S + 1.0) == []

    def starts(now: float) -> bool:
        return any(isinstance(fact, facts.GenerationStarted) for fact in core.decide(events.Tick(), now).facts)

    assert not starts(RESTART_S + REATTACH_S - 0.01)
    assert starts(RESTART_S + REATTACH_S)


@pytest.mark.parametrize("fault", ["kill_rank", "crash"], ids=["no node was removed", "the removed node is dead"])
def test_no_start_waits_for_memory_that_can_not_return(fault: str) -> None:
    core = fenced_again(training(), fault)
    assert len(members_attach(core, RESTART_S + 1.0)) == 1


def test_no_start_waits_for_a_removed_node_that_has_nothing() -> None:
    core = fenced_again(training(), "signal")
    attaches(core, "n2", RESTART_S + 1.0)
    assert len(members_attach(core, RESTART_S + 1.0)) == 1


def test_no_start_waits_for_memory_before_the_first_step() -> None:
    world = Scenario(2, 1)
    world.run_until(lambda: world.is_running(1))
    core = fenced_again(world, "signal")
    assert core.state.gangs["g"].newest.stepped_generation == 0
    assert len(members_attach(core, RESTART_S + 1.0)) == 1


# -- the store --


def moved(world: Scenario) -> list[str]:
    """The nodes that the store has moved to."""
    return [fact.store_node for fact in world.facts(facts.StoreMoved)]


def test_a_store_moves_at_once_from_a_node_that_is_removed() -> None:
    world = training()
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    assert world.gang.recovery.next_store_node == "n0"
    world.kill_agent("n0")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2, 5.0)
    assert len(moved(world)) == 1


def test_a_store_that_does_not_open_in_time_moves_to_the_next_node_that_carries_ranks() -> None:
    world = training()
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    core, now = Core(world.replayed_state(), world.now), world.now
    for member in core.state.gangs["g"].roster.present():
        attaches(core, member.node, now, opens=False)
    assert core.decide(events.Tick(), now + STORE_TIMEOUT_S - 0.1).facts == []
    assert core.decide(events.Tick(), now + STORE_TIMEOUT_S).facts == [facts.StoreMoved("g", "n2", missed=True)]


def test_a_store_moves_at_once_from_a_spare_to_a_node_that_carries_ranks() -> None:
    """At the fence no such node was in touch."""
    world = training()
    for node in ("n0", "n2"):
        world.post_event(events.PeerAccused("g", "n1", node, Silence.NO_ANSWER))
    crashed = AgentStatus(ranks=(RankState(1, 1, running=False, exit_code=1),))
    world.post_event(events.AgentReported("g", "n2", world.gang.roster.members["n2"].incarnation, crashed))
    assert world.gang.recovery.next_store_node == "n1"
    world.run_until(lambda: moved(world) == ["n0"])
    assert world.agent("n1").store_port == 0, "it is not waited for"
