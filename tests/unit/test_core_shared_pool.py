"""The shared pool: when a gang requests a node of it, whom it asks, and what becomes of a request."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import AgentStatus, Silence
from muster.daemon.coordinator.core.state.limits import Limits, Pool
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS, POOL

SOON_S = 5.0
"""Seconds, less than a gang waits for a node of the pool."""


def training(nodes: int, spares: int = 0, *, pool_nodes: int = 1, **more: object) -> Scenario:
    world = Scenario(nodes, spares, pool_nodes=pool_nodes, **more)  # type: ignore[arg-type]
    trains(world, 1, 150.0)  # longer than it waits for a spare
    return world


def trains(world: Scenario, generation: int, limit_s: float = 60.0) -> None:
    """Run until that generation has finished a step."""
    world.run_until(lambda: world.gang.newest.stepped_generation == generation, limit_s)


def preflight(**more: object) -> Scenario:
    """A gang whose first store is about to open. A node of the pool is free."""
    world = Scenario(2, 0, idle_nodes=1, pool_nodes=1, **more)  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.PREFLIGHT)
    return world


def requeued_soon(world: Scenario) -> None:
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, SOON_S)


def carriers(world: Scenario) -> set[str]:
    return {seat.node for seat in world.gang.roster.seats}


def requests(world: Scenario) -> list[facts.PoolNodeRequested]:
    return world.facts(facts.PoolNodeRequested)


def closed(world: Scenario) -> list[str]:
    """Why requests were closed."""
    return [fact.reason for fact in world.facts(facts.PoolRequestClosed)]


def cancelled(world: Scenario) -> list[int]:
    return [call.job for call in world.slurm if call.verb == "cancel"]


def repaired(world: Scenario, node: str) -> None:
    """An operator repairs the node once Slurm has drained it."""
    world.run_until(lambda: world.world.cluster.nodes()[node].drained)
    world.repair(node)
    world.run_until(lambda: world.core.state.node(node).health is NodeHealth.FIT)


def comes(world: Scenario, node: str, job: int = 1, restarts: int = 0, pool: int = 0) -> None:
    """An agent attaches that has no ranks to end."""
    status = AgentStatus(fenced_generation=world.gang.recovery.fenced_generation)
    world.post_event(
        events.AgentAttached("g", node, job, restarts, f"{node}-new", f"{node}:9", False, "", status, pool)
    )


# -- when a node is requested --


def test_the_wait_for_a_pool_node_is_no_part_of_the_fence() -> None:
    world = training(2, idle_nodes=1, launch_s=4.0)
    world.crash("n1")
    world.run_until(lambda: world.gang.newest.generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert recovery.detected_at < recovery.fenced_at < recovery.started_at - 2.0


def test_a_node_is_requested_before_the_ranks_leave_one_that_is_about_to_fail() -> None:
    world = training(3, idle_nodes=1)
    world.precursor("n1", "swap", "Xid 64")
    trains(world, 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out, recovery.nodes_in) == ("planned swap", ["n1"], ["n3"])
    assert recovery.step_restored == recovery.step_before
    assert len(requests(world)) == 1
    assert world.replayed_state() == world.core.state


def test_a_drained_node_is_left_for_one_of_the_pool() -> None:
    world = training(3, idle_nodes=1)
    world.drain("n1", "its fan is loud")
    trains(world, 2)
    assert world.gang.recovery.recoveries[-1].nodes_in == ["n3"]


def test_training_goes_on_while_no_node_of_the_pool_is_free() -> None:
    world = training(3)
    world.precursor("n1", "swap", "Xid 64")
    world.run_for(60)
    assert (world.gang.newest.generation, world.gang.phase, closed(world)) == (1, Phase.RUNNING, [])


def test_a_request_is_closed_when_the_precursor_is_over() -> None:
    world = training(3)
    world.precursor("n1", "swap", "Xid 64")
    world.run_until(lambda: any(request.job for request in world.gang.growth.pool.values()))
    world.precursor_over("n1", "Xid 64")
    world.run_for(1)
    assert closed(world) == ["it is wanted no more"]
    assert len(cancelled(world)) == 1


def test_a_recovery_waits_as_long_for_a_node_that_was_requested_beforehand() -> None:
    world = training(3)
    world.precursor("n1", "swap", "Xid 64")
    world.run_until(lambda: bool(requests(world)))
    world.crash("n2")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert len(requests(world)) == 1
    [reason] = closed(world)
    assert reason.startswith("no node has come within")


def test_after_a_refusal_a_generation_requests_no_node_beforehand() -> None:
    world = training(3)
    world.world.jobs.sbatch_failure_rate = 1.0
    world.precursor("n1", "swap", "Xid 64")
    world.run_for(10)
    assert (len(requests(world)), len(closed(world)), world.gang.newest.generation) == (1, 1, 1)


def test_a_gang_that_goes_on_with_fewer_nodes_requests_none_for_the_seats_it_gave_up() -> None:
    world = training(3, min_nodes=2)
    world.crash("n1")
    trains(world, 2)
    assert len(world.gang.roster.seats) == 2
    world.kill_rank("n0")
    trains(world, 3)
    assert len(requests(world)) == 1


def test_a_node_lost_before_the_first_start_is_replaced_from_the_pool() -> None:
    world = preflight()
    world.crash("n1")
    trains(world, 1)
    assert carriers(world) == {"n0", "n2"}
    assert (len(requests(world)), world.gang.slurm.restart_count) == (1, 0)


def test_in_observe_mode_no_node_is_requested_and_the_job_ends() -> None:
    world = preflight(limits=replace(NO_LIMITS, observe=True))
    world.crash("n1")
    world.run_until(lambda: world.gang.final, SOON_S)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 99)
    assert "observe mode: no spare is left for n1: the job would be requeued" in world.gang.reason
    assert (requests(world), world.slurm) == ([], [])


def test_a_site_without_a_pool_is_asked_for_no_node() -> None:
    world = training(2, limits=replace(NO_LIMITS, pool=Pool()))
    world.crash("n1")
    requeued_soon(world)
    assert requests(world) == []


def test_where_the_job_may_have_too_few_nodes_of_the_pool_none_is_requested() -> None:
    world = training(3, idle_nodes=2)
    world.signal("n1")
    world.signal("n2")
    requeued_soon(world)
    assert requests(world) == []


def test_an_elastic_gang_requests_as_many_nodes_as_it_may_have() -> None:
    world = training(4, idle_nodes=2, min_nodes=2)
    world.signal("n1")
    world.signal("n2")
    trains(world, 2)
    assert (len(requests(world)), len(world.gang.roster.seats)) == (1, 3)


def test_after_a_refusal_a_recovery_requests_no_more_nodes() -> None:
    world = training(2, idle_nodes=1)
    world.world.jobs.sbatch_failure_rate = 1.0
    world.crash("n1")
    requeued_soon(world)
    assert len(requests(world)) == 1
    assert closed(world) == ["sbatch: error: Batch job submission failed"]


# -- who is asked --


def test_an_agent_of_a_pool_job_is_not_asked_to_request_a_node() -> None:
    """It is no process of the gang's job."""
    world = training(2, idle_nodes=2, pool_nodes=2)
    world.crash("n1")
    trains(world, 2)
    world.signal("n0")
    requeued_soon(world)
    assert len(requests(world)) == 1


def test_agents_under_suspicion_are_not_asked_and_the_gang_waits_until_one_has_answered() -> None:
    world = training(3)
    world.signal("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    core, now = Core(world.replayed_state(), world.now, Limits(pool=POOL)), world.now + 0.1
    gang = core.state.gangs["g"]

    def attaches(node: str, fenced: int) -> list[facts.Fact]:
        one = gang.roster.members[node]
        status = AgentStatus(fenced_generation=fenced)
        hello = events.AgentAttached("g", node, one.job, 0, one.incarnation, "a:1", False, one.leaf, status)
        return core.decide(hello, now).facts

    attaches("n1", 1)
    for node in ("n0", "n2"):
        attaches(node, 0)
        core.decide(events.PeerAccused("g", "n1", node, Silence.NO_ANSWER), now)
    for node in ("n0", "n2"):
        reported = events.AgentReported(
            "g", node, gang.roster.members[node].incarnation, AgentStatus(fenced_generation=1)
        )
        assert core.decide(reported, now).facts == []
    assert attaches("n2", 1) == [facts.PoolNodeRequested("g", 1, "n2", POOL.options)]


def test_a_request_excludes_the_nodes_that_the_gang_has_left_without_a_known_fault() -> None:
    """Slurm itself keeps off a dead node, and a repaired node may come back."""
    world = training(4, spares=2)
    for generation, node in ((2, "n1"), (3, "n2")):
        world.crash(node)
        trains(world, generation)
    world.world.jobs.sbatch_failure_rate = 1.0  # or it would be a spare again
    repaired(world, "n1")
    world.kill_agent("n4")
    world.run_until(lambda: world.gang.growth.pool_serial == 2)
    assert requests(world)[1].options == (*POOL.options, "--exclude=n4")


def test_a_request_excludes_the_nodes_without_which_the_job_was_requeued() -> None:
    """Otherwise the next run would get a node that its job may not start on."""
    world = training(3, spares=0, idle_nodes=1, requeue=True)
    world.world.jobs.sbatch_failure_rate = 1.0  # the last run gets no node of the pool
    world.kill_agent("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    before = world.gang.growth.pool_serial
    world.crash("n2")
    world.run_until(lambda: world.gang.growth.pool_serial > before)
    assert requests(world)[-1].options == (*POOL.options, "--exclude=n1")


# -- what becomes of a request --


def test_a_gang_whose_seats_are_filled_without_the_pool_starts_and_gives_the_request_up() -> None:
    world = training(3, spares=1, absent=["n3"])
    world.crash("n1")
    world.run_until(lambda: any(request.job for request in world.gang.growth.pool.values()))
    job = world.gang.growth.pool[1].job
    comes(world, "n3")
    world.run_until(lambda: world.gang.newest.generation == 2, 1.0)
    assert carriers(world) == {"n0", "n2", "n3"}
    assert (closed(world), cancelled(world)) == (["it is wanted no more"], [job])


def test_the_small_job_of_a_dead_member_is_ended_at_once() -> None:
    world = training(3, idle_nodes=1, min_nodes=2)
    world.crash("n1")
    trains(world, 2)
    job = world.gang.growth.pool[1].job
    world.crash("n3")
    world.run_until(lambda: world.gang.roster.members["n3"].gone)
    assert closed(world) == [world.gang.roster.members["n3"].removal_reason]
    assert cancelled(world) == [job]


def test_a_node_that_comes_back_with_a_second_small_job_frees_the_first() -> None:
    world = training(3, idle_nodes=1)
    world.crash("n1")
    trains(world, 2)
    world.signal("n3")
    world.run_until(lambda: 2 in world.gang.growth.pool)
    repaired(world, "n3")
    first, second = (request.job for request in world.gang.growth.pool.values())
    comes(world, "n3", job=second, pool=2)
    assert (world.gang.roster.members["n3"].job, cancelled(world)) == (second, [first])


def test_a_job_that_slurm_starts_again_gives_its_nodes_of_the_pool_back() -> None:
    world = training(3, idle_nodes=1)
    world.crash("n1")
    trains(world, 2)
    job = world.gang.growth.pool[1].job
    comes(world, "n0", restarts=1)
    assert (closed(world), cancelled(world)) == (["the job was started again"], [job])


@pytest.mark.parametrize("node", ["n0", "n2"])
def test_a_job_that_slurm_starts_again_drops_its_unanswered_requests(node: str) -> None:
    """The agent that was to ask may not have come yet."""
    world = training(3)
    world.crash("n1")
    world.run_until(lambda: bool(world.gang.growth.pool))
    comes(world, node, restarts=1)
    assert (world.gang.growth.pool, len(closed(world))) == ({}, 1)
