"""Strangers hold all connections that a node daemon's port allows: no probe reaches the daemon, and it lives."""

from muster.daemon.coordinator.core.state import facts
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def training() -> Scenario:
    world = Scenario(4, 1)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    return world


def test_a_node_whose_daemon_sends_heartbeats_does_not_hang() -> None:
    world = training()
    world.machines["n1"].daemon_port_exhausted = True
    world.kill_agent("n1")
    world.run_until(lambda: world.gang.roster.members["n1"].removed, 120.0)
    assert not world.facts(facts.NodeJudged)
    assert world.slurm == []


def test_a_node_that_hangs_is_found_although_its_daemons_port_was_exhausted() -> None:
    world = training()
    world.machines["n1"].daemon_port_exhausted = True
    world.pause("n1")
    world.run_until(lambda: world.core.state.node("n1").health is NodeHealth.HUNG)
