"""Correlated faults: which node a signal blames, after how long, and that no signal is forgotten."""

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.limits import Limits
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario

NVLINK = "Xid 74: NVLink error"


def training(nodes: int = 6, spares: int = 3, **more: object) -> Scenario:
    world = Scenario(nodes, spares, **more)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    world.run_for(5.0)
    return world


def is_called(world: Scenario, node: str, health: NodeHealth) -> Callable[[], bool]:
    return lambda: world.core.state.node(node).health is health


def judged(world: Scenario) -> dict[str, NodeHealth]:
    return {name: node.health for name, node in world.core.state.nodes.items() if node.health is not NodeHealth.FIT}


def test_without_a_lost_peer_the_node_is_unfit_soon() -> None:
    world = training()
    world.signal("n2", "unfit_unless_explained", NVLINK)
    began = world.now
    world.run_until(is_called(world, "n2", NodeHealth.UNFIT))
    assert 2.4 < world.now - began < 2.7
    assert [(call.verb, call.node) for call in world.slurm] == [("drain", "n2")]
    assert world.facts(facts.CorrelatedFaultResolved) == [facts.CorrelatedFaultResolved("n2")]


def test_the_signal_waits_for_a_peer_that_is_hung_only_after_long() -> None:
    world = training()
    world.pause("n1")
    world.run_for(0.1)
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(30.0)
    assert judged(world) == {"n1": NodeHealth.HUNG}
    assert world.facts(facts.CorrelatedFaultResolved) == [facts.CorrelatedFaultResolved("n2", "n1")]


def test_the_signal_waits_while_many_silent_nodes_are_not_taken_out_yet() -> None:
    world = training()
    for node in ("n1", "n3", "n5"):
        world.power_off(node)
    world.run_for(0.1)
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(80.0)
    assert judged(world) == dict.fromkeys(("n1", "n3", "n5"), NodeHealth.LOST)
    assert world.core.state.correlated_faults == {}


def test_once_the_peer_has_answered_the_signal_is_the_nodes_own() -> None:
    world = training()
    world.pause("n1")
    world.run_for(1.5)
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(3.0)
    assert judged(world) == {}
    world.resume("n1")
    world.run_until(is_called(world, "n2", NodeHealth.UNFIT), 3.0)


def test_repeated_signals_do_not_delay_the_decision() -> None:
    world = training()
    for second in range(10):
        world.world.schedule.call_later(float(second), world.signal, "n2", "unfit_unless_explained", NVLINK)
    world.run_until(is_called(world, "n2", NodeHealth.UNFIT), 3.0)
    world.run_for(10.0)
    assert len(world.facts(facts.CorrelatedFaultSuspected)) == 1


def test_an_unfit_node_does_not_explain_the_signal_of_another() -> None:
    world = training()
    world.signal("n1", "unfit_unless_explained", "Xid 95")
    world.run_for(2.0)
    world.signal("n2", "unfit_unless_explained", "Xid 95")
    world.run_for(10.0)
    assert judged(world) == {"n1": NodeHealth.UNFIT, "n2": NodeHealth.UNFIT}


def test_the_loss_of_a_node_that_is_no_peer_explains_nothing() -> None:
    world = training(nodes=4, spares=1, idle_nodes=1)
    stranger = "n5"
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(0.5)
    world.core.state.nodes[stranger].health = NodeHealth.LOST
    world.core.state.nodes[stranger].judged_at = world.now
    world.core.index.out_of_service.add(stranger)
    world.run_until(is_called(world, "n2", NodeHealth.UNFIT), 3.0)


def test_a_signal_right_after_a_peers_loss_is_explained_by_it() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(is_called(world, "n1", NodeHealth.LOST))
    world.run_for(1.0)
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(20.0)
    assert judged(world) == {"n1": NodeHealth.LOST}
    assert world.facts(facts.CorrelatedFaultSuspected) == []


def test_a_restarted_coordinator_decides_the_signal() -> None:
    world = training()
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(1.0)
    world.restart_coordinator()
    assert list(world.core.state.correlated_faults) == ["n2"]
    world.run_until(is_called(world, "n2", NodeHealth.UNFIT), 10.0)
    assert world.replayed_state() == world.core.state


def test_a_restarted_coordinator_gives_the_lost_peer_the_time_to_attach() -> None:
    world = training()
    world.world.coordinator_restart_s = 20.0
    world.world.crash_coordinator("as the script says")
    world.run_for(2.0)
    world.power_off("n1")
    world.run_for(0.1)
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(60.0)
    assert judged(world) == {"n1": NodeHealth.LOST}


def test_a_job_that_ends_with_the_loss_leaves_its_peers_fit() -> None:
    world = training(nodes=2, spares=0, requeue=False)
    world.power_off("n1")
    world.run_for(0.1)
    world.signal("n0", "unfit_unless_explained", NVLINK)
    world.run_until(lambda: world.gang.final, 90.0)
    world.run_for(10.0)
    assert judged(world) == {"n1": NodeHealth.LOST}


@pytest.mark.parametrize("signal_action", ["unfit", "degraded"])
def test_a_fatal_signal_settles_the_wait_and_a_lesser_one_does_not(signal_action: str) -> None:
    world = training()
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(0.5)
    world.signal("n2", signal_action, "Xid 79")
    world.run_for(0.5)
    assert list(world.core.state.correlated_faults) == ([] if signal_action == "unfit" else ["n2"])
    world.run_for(10.0)
    assert judged(world) == {"n2": NodeHealth.UNFIT}
    assert [call.verb for call in world.slurm].count("drain") == 1


def test_in_observe_mode_the_signal_is_decided_once() -> None:
    world = training(limits=Limits(observe=True))
    world.signal("n2", "unfit_unless_explained", NVLINK)
    world.run_for(20.0)
    assert judged(world) == {"n2": NodeHealth.DEGRADED}
    assert len(world.facts(facts.CorrelatedFaultResolved)) == 1
