"""Jobs that Slurm suspends: an operator with `scontrol suspend`, or Slurm itself for a job of a higher priority."""

from muster.daemon.coordinator.core.detection.failure_detector import MUTE_TIMEOUT_S
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import waiting_for
from muster.daemon.coordinator.slurm.watch import JOB_POLL_INTERVAL_S, jobs_in_doubt
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario

LONG_S = 600.0
"""Seconds after which every limit on the silence of an agent, and on the time to gather, has passed."""


def suspend(world: Scenario, job: int = 1, *, resume: bool = False) -> None:
    """Slurm stops every process of the job, or lets it go on. The daemons of the nodes run."""
    cluster = world.world.cluster
    (cluster.resume_job if resume else cluster.suspend)(job)
    for agent in world.world.agents.values():
        if agent.identity.job == job:
            world.world.set_stopped(agent, not resume)


def steps(world: Scenario) -> int:
    return world.core.observed.gang("g").step_number


def waits_for(world: Scenario) -> str:
    return waiting_for(world.core.state, world.core.observed, world.gang)


def with_pool_node(**more: object) -> tuple[Scenario, int]:
    """A gang that trains on n0 and on n2 of the shared pool, and the job of n2."""
    world = Scenario(2, 0, idle_nodes=1, pool_nodes=1, **more)  # type: ignore[arg-type]
    world.run_until(lambda: steps(world) >= 6)
    world.crash("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    return world, world.gang.roster.members["n2"].job


def test_a_suspended_job_keeps_its_nodes_and_its_memory_and_goes_on_when_it_is_resumed() -> None:
    world = Scenario(3, 1)
    world.run_until(lambda: steps(world) >= 6)
    step, seats = steps(world), world.gang.roster.seats
    suspend(world)
    world.run_for(LONG_S)
    assert (world.gang.phase, world.gang.newest.generation, world.slurm) == (Phase.RUNNING, 1, [])
    assert waits_for(world).startswith("Slurm to resume job 1, ")
    assert "probes" not in waits_for(world)
    suspend(world, resume=True)
    world.run_until(lambda: steps(world) > step + 6, 60)
    assert [seat.node for seat in world.gang.roster.seats] == [seat.node for seat in seats]
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())
    assert world.slurm == []
    world.run_until(lambda: waits_for(world) == "")


def test_slurm_is_asked_for_every_flag_of_a_job_that_stands_still_before_its_agents_count_as_hung() -> None:
    world = Scenario(3, 1)
    world.run_until(lambda: steps(world) >= 6)

    def doubted() -> set[int]:
        return jobs_in_doubt(world.core.state, world.core.observed)

    assert doubted() == set()
    for agent in world.world.agents.values():
        world.world.set_stopped(agent, True)
    world.run_until(lambda: doubted() == {1})
    world.run_for(MUTE_TIMEOUT_S - 2 * JOB_POLL_INTERVAL_S)
    suspend(world)  # what Slurm says at the next look
    world.run_for(LONG_S)
    assert (world.gang.phase, world.gang.newest.generation, world.slurm) == (Phase.RUNNING, 1, [])
    assert doubted() == {1}, "so that its end is seen"
    suspend(world, resume=True)
    world.run_until(lambda: doubted() == set())


def test_a_node_of_the_pool_whose_job_is_suspended_stays_and_goes_on_when_it_is_resumed() -> None:
    world, job = with_pool_node()
    before = len(world.slurm)
    suspend(world, job)
    world.run_for(LONG_S)
    assert (world.gang.phase, world.gang.newest.generation, len(world.slurm)) == (Phase.RUNNING, 2, before)
    assert waits_for(world).startswith(f"Slurm to resume job {job}, ")
    suspend(world, job, resume=True)
    world.run_until(lambda: world.gang.newest.stepped_generation == 3, 60)  # an agent that was paused ends its ranks
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert world.gang.restore.restored_version is not None
    assert world.core.state.nodes["n2"].health is NodeHealth.FIT


def test_a_suspended_node_without_ranks_keeps_no_gang_from_a_recovery() -> None:
    """A repaired node came back as a spare, with a job of its own."""
    world = Scenario(3, 2)
    world.run_until(lambda: steps(world) >= 6)
    world.crash("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.run_until(lambda: world.world.cluster.nodes()["n1"].drained)
    world.repair("n1")
    world.run_until(lambda: "n1" in {member.node for member in world.gang.roster.present()})
    suspend(world, world.gang.roster.members["n1"].job)
    world.run_for(1)
    assert waits_for(world) == ""
    world.crash("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    assert {seat.node for seat in world.gang.roster.seats} == {"n0", "n3", "n4"}
    assert world.core.state.node("n1").health is NodeHealth.FIT


def test_a_suspended_node_of_the_pool_keeps_no_gang_from_saving_before_its_time_limit() -> None:
    world, job = with_pool_node(time_limit_s=400, stop_before_s=60.0, durable_dir="/durable")
    suspend(world, job)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED or world.gang.final, 400)
    assert world.gang.reason.startswith("stopped for the time limit of job 1, ")
    assert world.gang.checkpoint.durable_version is not None
    assert world.core.state.node("n2").health is NodeHealth.FIT


def test_a_job_that_is_suspended_while_it_gathers_has_all_its_time_afterwards() -> None:
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=60.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    suspend(world)
    world.run_for(LONG_S)
    assert world.gang.phase is Phase.GATHERING
    suspend(world, resume=True)
    world.run_for(50.0)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.final, 60)


def test_a_suspended_job_that_is_cancelled_ends() -> None:
    world = Scenario(2, 0)
    world.run_until(lambda: steps(world) >= 6)
    suspend(world)
    world.run_for(60)
    world.world.cluster.cancel(world.gang.slurm.job)
    world.run_until(lambda: world.gang.final, 60)
    assert world.gang.phase is Phase.CANCELLED
