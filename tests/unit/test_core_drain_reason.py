"""The reason that Slurm shows of a node says on whose word Muster has taken the node out of service."""

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection import drain_reason
from muster.daemon.coordinator.core.detection.drain_reason import DrainReason, DrainSource
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def test_a_signal_drains_its_node_on_the_nodes_word() -> None:
    world = Scenario(2, 1)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    world.signal("n1", "unfit", "Xid 79")
    world.run_until(lambda: bool(world.slurm))
    assert world.slurm[0].text == "muster: [node] Xid 79"
    assert world.core.state.node("n1").reason == "Xid 79"


def test_a_request_drains_a_node_on_the_users_word() -> None:
    assert str(DrainReason("firmware update", DrainSource.USER)) == "muster: [user] firmware update"


@pytest.mark.parametrize("source", DrainSource)
def test_a_reason_is_read_back_as_it_was_written(source: DrainSource) -> None:
    reason = DrainReason("[user] disk: muster: full", source)
    assert drain_reason.parse(str(reason)) == reason


@pytest.mark.parametrize("text", ["", "disk", "not muster: [node] Xid 79", "Muster: [node] Xid 79", "muster:[node] x"])
def test_a_reason_of_somebody_else_is_none_of_musters(text: str) -> None:
    assert drain_reason.parse(text) is None


@pytest.mark.parametrize(
    "text", ["muster: [node] ranks could not be killed", "muster: ranks could not be killed"], ids=["now", "earlier"]
)
def test_a_drain_that_an_earlier_release_owed_is_still_understood(text: str) -> None:
    core = Core(DurableState(), 0.0)
    owed = facts.SlurmCallOwed("g", 1, "drain", 1, "n1", text, if_run_has_node=0)
    apply(core.state, facts.GangRegistered("g", 1, 1000, "g", events.GangSpec(2, 1), "{}"), 0.0)
    apply(core.state, owed, 0.0)
    core.decide(events.SlurmAnswered("g", 1, None), 1.0)
    node = core.state.node("n1")
    assert (node.health, node.reason) == (NodeHealth.UNFIT, "ranks could not be killed")
