"""Excluded nodes: which nodes a requeued job may start on again, at the next requeue and while it waits."""

from muster.daemon.coordinator.core.recovery.requeueing import EXCLUSION_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase
from muster.simulator.scenarios.scenario import Scenario


def requeued_without_n1(fault: str, idle_nodes: int = 0) -> Scenario:
    """A job of two nodes that waits in the queue, because the fault has taken n1 out."""
    world = Scenario(2, 0, idle_nodes=idle_nodes)
    trains(world, 1)
    getattr(world, fault)("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.excluded == ("n1",)
    return world


def trains(world: Scenario, generation: int, limit_s: float = 60.0) -> None:
    """Run until that generation has finished a step."""
    world.run_until(lambda: world.gang.stepped_generation == generation, limit_s)


def calls(world: Scenario, verb: str) -> list[facts.SlurmCallOwed]:
    return [call for call in world.slurm if call.verb == verb]


def requeued_again(world: Scenario, node: str) -> facts.SlurmCallOwed:
    """The second requeue, after the agent on this node has ended."""
    world.kill_agent(node)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    return calls(world, "requeue")[1]


def test_the_next_requeue_admits_a_node_that_was_repaired_meanwhile() -> None:
    world = requeued_without_n1("crash", idle_nodes=1)
    trains(world, 2)
    world.repair("n1")
    world.run_until(lambda: world.core.state.node("n1").health is NodeHealth.FIT)
    requeue = requeued_again(world, "n2")
    assert (requeue.exclude, requeue.admit) == (("n2",), ("n1",))


def test_the_next_requeue_does_not_admit_a_node_that_is_still_out_of_service() -> None:
    world = requeued_without_n1("crash", idle_nodes=1)
    trains(world, 2)
    requeue = requeued_again(world, "n2")
    assert (requeue.exclude, requeue.admit) == (("n2",), ())


def test_the_next_requeue_does_not_admit_a_node_that_it_excludes() -> None:
    world = requeued_without_n1("kill_agent")
    trains(world, 2, EXCLUSION_S + 60.0)
    requeue = requeued_again(world, "n1")
    assert (requeue.exclude, requeue.admit) == (("n1",), ())


def test_a_node_out_of_service_stays_excluded_however_long_the_job_waits() -> None:
    world = requeued_without_n1("crash")
    world.run_for(EXCLUSION_S + 60.0)
    assert calls(world, "admit") == []


def test_a_node_that_becomes_degraded_while_the_job_waits_is_not_repaired() -> None:
    world = requeued_without_n1("kill_agent")
    world.run_for(5.0)
    world.signal("n1", "degraded", "row remapping is pending")
    world.run_for(EXCLUSION_S - 60.0)
    assert world.core.state.node("n1").health is NodeHealth.DEGRADED
    assert calls(world, "admit") == []
    world.run_until(lambda: bool(calls(world, "admit")), 70.0)
