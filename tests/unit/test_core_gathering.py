"""Gatherings that fail: when a job starts with fewer nodes, is requeued, or ends."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS

OBSERVE = replace(NO_LIMITS, observe=True)
LACKS_A_SPARE_S = 25.0
"""Seconds, less than a complete set of nodes waits for a spare."""


def test_an_elastic_job_starts_with_the_nodes_that_have_come_in_time() -> None:
    world = Scenario(3, 0, absent=["n2"], min_nodes=2, gather_timeout_s=20.0)
    world.run_for(19.0)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.newest.stepped_generation == 1, 5.0)
    assert {seat.node for seat in world.gang.roster.seats} == {"n0", "n1"}


def test_in_observe_mode_an_elastic_job_does_not_start_with_fewer_nodes() -> None:
    """It ends, as it would without Muster."""
    world = Scenario(3, 0, absent=["n2"], min_nodes=2, gather_timeout_s=20.0, limits=OBSERVE)
    world.run_until(lambda: world.gang.final, 25.0)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 95)
    assert world.gang.newest.generation == 0


@pytest.mark.parametrize("given", [{"requeue": False}, {"limits": OBSERVE}], ids=["no requeue", "observe mode"])
def test_a_job_that_may_not_be_requeued_ends_though_another_start_may_help(given: dict[str, object]) -> None:
    world = Scenario(3, 1, absent=["n2"], gather_timeout_s=40.0, **given)  # type: ignore[arg-type]
    world.run_until(lambda: len(world.gang.roster.members) == 3)
    world.kill_agent("n3")
    world.run_until(lambda: world.gang.final, 50.0)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 95)
    assert world.slurm == []


def test_a_job_that_still_gathers_writes_no_checkpoint_before_its_requeue() -> None:
    """The nodes keep what the earlier run left in their memory."""
    world = Scenario(2, 1, durable_dir="/durable")
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    world.world.durable_storage.fails_until = world.now + 1000.0
    world.world.jobs.unstartable_nodes.add("n1")
    world.sigterm()
    world.run_until(lambda: world.gang.slurm.restart_count == 1 and len(world.gang.roster.members) == 2)
    assert all(world.agent(node).memory.shards() for node in world.gang.roster.members)
    flushes = len(world.facts(facts.FlushOrdered))
    world.signal("n0")
    world.signal("n2")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, LACKS_A_SPARE_S)
    assert len(world.facts(facts.FlushOrdered)) == flushes == 1


def test_a_job_that_is_requeued_for_a_dead_node_may_not_start_on_that_node() -> None:
    """The node was never a member, and Slurm still has it in the job."""
    world = Scenario(3, 0, absent=["n1"], gather_timeout_s=40.0)
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    world.world.slurmd_connected.add("n1")
    world.cut(("n1", "coordinator"), ("coordinator", "n1"))
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 50.0)
    assert [(call.verb, call.exclude) for call in world.slurm] == [("requeue", ("n1",))]


@pytest.mark.parametrize("loses", [True, False])
def test_a_job_whose_first_node_dies_before_the_batch_script_starts_does_not_wait_for_the_timeout(loses: bool) -> None:
    """Nobody is left who would start an agent. A script that only starts late has all its time."""
    world = Scenario(2, 1, idle_nodes=1, launch_s=50.0, gather_timeout_s=300.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    if loses:
        world.power_off("n0")
        world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 45)
        assert "the batch process of the job is silent" in world.gang.reason
        assert "n0" in next(call for call in world.slurm if call.verb == "requeue").exclude
    world.run_until(lambda: world.gang.newest.stepped_generation == 1, 90)
    assert world.gang.slurm.restart_count == loses


@pytest.mark.parametrize(("dies", "least_s", "most_s"), [("n0", 30.0, 45.0), ("n2", 60.0, 150.0)])
def test_the_first_nodes_death_lets_the_others_wait_no_longer_than_for_a_spare(
    dies: str, least_s: float, most_s: float
) -> None:
    """srun runs on n0, the batch host. While it lives it tries to reach another dead node, and then ends all agents."""
    world = Scenario(2, 1, absent=[dies])
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    began = world.now
    world.power_off(dies)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1, 200)
    assert least_s <= world.now - began < most_s
    assert {seat.node for seat in world.gang.roster.seats} == {"n0", "n1", "n2"} - {dies}
