"""Excluded nodes: which nodes a requeued job may start on again, at the next requeue and while it waits."""

import re

from muster.daemon.coordinator.core.recovery.requeueing import EXCLUSION_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def requeued_without_n1(fault: str, idle_nodes: int = 0) -> Scenario:
    """A job of two nodes that waits in the queue, because the fault has taken n1 out."""
    world = Scenario(2, 0, idle_nodes=idle_nodes)
    trains(world, 1)
    getattr(world, fault)("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.slurm.excluded == ("n1",)
    return world


def trains(world: Scenario, generation: int, limit_s: float = 60.0) -> None:
    """Run until that generation has finished a step."""
    world.run_until(lambda: world.gang.newest.stepped_generation == generation, limit_s)


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


def test_the_next_requeue_does_not_admit_a_node_in_service_that_failed_the_job_a_moment_ago() -> None:
    world = requeued_without_n1("kill_agent", idle_nodes=1)
    trains(world, 2)
    requeue = requeued_again(world, "n2")
    assert (requeue.exclude, requeue.admit) == (("n2",), ())


def test_a_node_that_failed_the_job_long_ago_is_admitted_while_one_that_failed_it_lately_is_not() -> None:
    world = requeued_without_n1("kill_agent", idle_nodes=1)
    trains(world, 2)
    world.run_for(EXCLUSION_S - 100.0)
    requeued_again(world, "n2")
    world.run_until(lambda: bool(calls(world, "admit")), 200.0)
    assert calls(world, "admit")[0].admit == ("n1",)


def shown(world: Scenario) -> list[tuple[str, str, float]]:
    """What `muster status` says of the excluded nodes: the reason, and for how many seconds from now on."""
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    return [(one.node, one.reason, round(one.until_s - world.now) if one.until_s else 0) for one in view.exclusions]


def test_an_exclusion_is_shown_with_its_reason_and_its_end() -> None:
    world = requeued_without_n1("kill_agent", idle_nodes=1)
    assert shown(world) == [("n1", "muster-agent on n1 has ended", EXCLUSION_S)]
    world.run_for(100.0)
    assert shown(world) == [("n1", "muster-agent on n1 has ended", EXCLUSION_S - 100)]
    assert world.replayed_state().gangs["g"].slurm.exclusions == world.gang.slurm.exclusions


def test_the_exclusion_of_a_node_out_of_service_has_no_end_of_its_own() -> None:
    world = requeued_without_n1("crash")
    [(node, reason, until)] = shown(world)
    assert (node, until) == ("n1", 0)
    assert reason.startswith("n1 is lost")


def test_an_exclusion_that_is_over_is_shown_no_more() -> None:
    world = requeued_without_n1("kill_agent")
    world.run_until(lambda: bool(calls(world, "admit")), EXCLUSION_S + 60.0)
    assert shown(world) == []


def test_the_list_can_be_read() -> None:
    world = requeued_without_n1("crash")
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    shown = "\n".join(gang_details(view, Screen(160)))
    heading = r"excluded +since \(UTC.*\) +until +why\nnode"
    assert re.search(heading + r"\nn1 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +its repair +see node n1\n", shown)
    assert shown.count("n1 is lost") == 1
