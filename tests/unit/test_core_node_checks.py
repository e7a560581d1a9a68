"""Node checks before the first start, in simulated worlds: which nodes get a seat, and what becomes of the others."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import CheckOutcome, NodeCheck
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def gang(nodes: int = 4, spares: int = 2, **given: object) -> Scenario:
    return Scenario(nodes, spares, preflight=True, **given)  # type: ignore[arg-type]


def running(world: Scenario) -> Callable[[], bool]:
    return lambda: world.gang.phase is Phase.RUNNING


def carrying(world: Scenario) -> set[str]:
    return {seat.node for seat in world.gang.roster.seats}


def report(world: Scenario, node: str, **found: object) -> None:
    """The node check of `node` ends with this instead of what the simulator lets it find."""
    agent = world.agent(node)
    agent.node_check = NodeCheck(**{"outcome": CheckOutcome.PASSED, "hardware": "same", **found})  # type: ignore[arg-type]
    agent.status_changed()


def all_attached(world: Scenario) -> Callable[[], bool]:
    return lambda: "g" in world.core.state.gangs and world.gang.phase is Phase.PREFLIGHT


@pytest.mark.parametrize("outcome", ["wrong", "failed"])
def test_a_spare_takes_the_seat_of_a_node_that_fails_before_the_first_step(outcome: str) -> None:
    world = gang()
    world.fail_check("n1", outcome)
    world.run_until(running(world))
    assert carrying(world) == {"n0", "n2", "n3", "n4"}
    assert world.gang.newest.generation == 1
    assert world.gang.roster.members["n1"].removal_reason.startswith("n1 has failed its node check")
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.run_for(40)
    assert [(call.verb, call.node) for call in world.slurm] == [("let_go", "n1")]


def test_a_check_that_hangs_delays_the_start_a_little_if_enough_nodes_have_passed() -> None:
    world = gang()
    world.fail_check("n1", "silent")
    world.run_until(running(world), 30)
    assert carrying(world) == {"n0", "n2", "n3", "n4"}
    assert not world.gang.roster.members["n1"].removed
    world.run_for(70)
    assert world.gang.roster.members["n1"].removed


def test_the_start_waits_for_the_checks_that_it_needs() -> None:
    world = gang(spares=0)
    world.run_until(all_attached(world))
    world.run_until(running(world))
    checked = [at for at, fact in world.journal if isinstance(fact, facts.NodeChecked)]
    started = next(at for at, fact in world.journal if isinstance(fact, facts.GenerationStarted))
    assert len(checked) == 4
    assert max(checked) <= started


def test_without_a_spare_the_job_is_requeued_and_kept_from_the_node() -> None:
    world = gang(spares=0, idle_nodes=1)
    world.fail_check("n1", "wrong")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert "n1" in world.gang.slurm.exclusions
    assert "node check" in world.gang.slurm.exclusions["n1"].reason
    world.run_until(running(world), 300)
    assert "n1" not in carrying(world)


def test_if_most_nodes_fail_the_software_is_the_cause_and_the_gang_starts() -> None:
    world = gang(nodes=4, spares=0)
    for node in ("n0", "n1", "n2"):
        world.fail_check(node, "failed")
    world.run_until(running(world))
    assert carrying(world) == {"n0", "n1", "n2", "n3"}
    assert not any(member.removed for member in world.gang.roster.members.values())


def test_observe_mode_leaves_nobody_out() -> None:
    world = gang(limits=Limits(observe=True))
    world.fail_check("n1", "wrong")
    world.run_until(running(world))
    assert not world.gang.roster.members["n1"].removed


def test_a_slow_node_is_started_on_only_if_no_other_node_is_left() -> None:
    world = gang(spares=1)
    world.fail_check("n1", "slow")
    world.run_until(running(world))
    assert carrying(world) == {"n0", "n2", "n3", "n4"}
    assert not world.gang.roster.members["n1"].removed
    alone = gang(spares=0)
    alone.fail_check("n1", "slow")
    alone.run_until(running(alone))
    assert carrying(alone) == {"n0", "n1", "n2", "n3"}


def test_a_degraded_spare_comes_before_a_node_that_has_failed() -> None:
    """Two of three have failed, which removes nobody."""
    world = gang(nodes=2, spares=1)
    world.fail_check("n0")
    world.fail_check("n2")
    world.run_until(all_attached(world))
    world.precursor("n1", "record")
    world.run_until(running(world))
    assert "n1" in carrying(world)


@pytest.mark.parametrize("rate", ["gflops", "memory_gb_s", "host_to_device_gb_s"])
@pytest.mark.parametrize(("shared", "seated"), [(False, False), (True, True)])
def test_a_node_far_below_the_median_of_its_gang_is_slow_unless_its_cores_are_shared(
    shared: bool, seated: bool, rate: str
) -> None:
    world = gang(nodes=3, spares=1)
    world.run_until(all_attached(world))
    for node in ("n0", "n1", "n2", "n3"):
        rates = {"gflops": 100.0, "memory_gb_s": 10.0, "host_to_device_gb_s": 5.0}
        rates[rate] *= 0.6 if node == "n2" else 1.0
        report(world, node, **rates, cores_shared=shared)
    world.run_until(running(world))
    assert ("n2" in carrying(world)) is seated


def test_nodes_of_different_kinds_are_not_compared() -> None:
    world = gang(nodes=3, spares=1)
    world.run_until(all_attached(world))
    for node in ("n0", "n1", "n2", "n3"):
        report(world, node, gflops=100.0, memory_gb_s=10.0)
    report(world, "n2", gflops=10.0, memory_gb_s=10.0, hardware="another")
    world.run_until(running(world))
    assert "n2" in carrying(world)


def test_a_spare_that_fails_while_the_others_train_leaves_the_gang() -> None:
    world = gang(nodes=2, spares=2)
    world.fail_check("n3", "silent")
    world.run_until(running(world))
    world.run_until(lambda: world.gang.roster.members["n3"].removed, 120)
    assert world.gang.newest.generation == 1


def test_a_spare_that_fails_is_not_called_the_cause_of_a_recovery() -> None:
    world = gang(nodes=3, spares=1)
    world.fail_check("n3", "silent")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.kill_rank("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    report(world, "n3", outcome=CheckOutcome.WRONG)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert (world.gang.recovery.recoveries[-1].nodes_out, world.gang.recovery.failures_in_a_row) == ([], 1)


def test_a_swap_waits_for_no_check() -> None:
    """A spare whose check still runs takes the seat if it is the only one."""
    world = gang(nodes=3, spares=1)
    world.fail_check("n3", "silent")
    world.run_until(running(world))
    world.power_off("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2, 30)
    assert "n3" in carrying(world)


def test_one_agent_has_one_result() -> None:
    """A process of the job's owner could change its report for ever."""
    world = gang(nodes=2, spares=0)
    world.run_until(running(world))
    for number in range(5):
        report(world, "n1", gflops=float(number))
        world.run_for(1)
    assert len([fact for fact in world.facts(facts.NodeChecked) if fact.node == "n1"]) == 1


def test_a_restarted_coordinator_knows_who_failed() -> None:
    world = gang()
    world.fail_check("n1", "wrong")
    world.run_until(running(world))
    before = replace(world.gang.roster.members["n1"])
    world.restart_coordinator()
    assert world.gang.roster.members["n1"] == before
    assert world.replayed_state().node("n2").check == world.core.state.node("n2").check is not None


def test_a_job_without_a_preflight_waits_for_nothing() -> None:
    world = Scenario(4, 0)
    world.run_until(running(world))
    assert world.facts(facts.NodeChecked) == []
