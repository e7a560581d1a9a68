"""Requeued jobs: on which nodes a job may not start, until when, and what keeps it from gathering."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.growth.shared_pool import refusal
from muster.daemon.coordinator.core.recovery.requeueing import EXCLUSION_S
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.slurm_jobs import PoolRequest
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.slurm_jobs import JobSubmission
from muster.simulator.world.world import NO_LIMITS, POOL
from muster.slurm.client.types import updated_exclusions


def training(nodes: int, spares: int, **spec: object) -> Scenario:
    world = Scenario(nodes, spares, **{"durable_dir": "/durable", **spec})  # type: ignore[arg-type]
    steps(world, 1)
    return world


def steps(world: Scenario, generation: int) -> None:
    """Run until that generation has made a few steps."""
    world.run_until(lambda: world.is_running(generation) and world.gang.newest.stepped_generation == generation, 900)
    step = world.core.observed.gang("g").step_number
    world.run_until(lambda: world.core.observed.gang("g").step_number > step + 3)


def excluded(world: Scenario) -> tuple[str, ...]:
    """The nodes that Slurm excludes from the job."""
    return world.world.cluster.jobs()[world.gang.slurm.job].excluded


def calls(world: Scenario, verb: str) -> list[facts.SlurmCallOwed]:
    return [call for call in world.slurm if call.verb == verb]


def test_a_job_that_waits_may_start_on_a_node_again_that_was_repaired() -> None:
    world = training(nodes=2, spares=0)
    world.crash("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_for(30)
    assert excluded(world) == ("n1",)
    world.repair("n1")
    world.run_until(lambda: world.gang.newest.generation == 2, 60)
    assert calls(world, "admit")[0].admit == ("n1",)
    assert excluded(world) == ()


def test_a_batch_process_may_end_once_slurm_has_its_run_back_in_the_queue() -> None:
    world = training(nodes=2, spares=0)

    def may_leave() -> bool:
        return world.core.batch_may_end(world.gang, world.gang.slurm.job, 0)

    assert not may_leave()
    world.world.slurm.unavailable_reason = "slurmctld is away"
    world.crash("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_for(20)
    assert not may_leave(), "its end would be the job's"
    world.world.slurm.unavailable_reason = ""
    world.run_until(may_leave, 20)
    assert not world.core.batch_may_end(world.gang, world.gang.slurm.job, 1), "that is the run to come"
    assert not world.core.batch_may_end(world.gang, world.gang.slurm.job + 1, 0), "that is another job"
    world.restart_coordinator()
    assert not may_leave(), "Slurm has not told this coordinator yet"
    world.run_until(may_leave, 20)


def test_at_the_next_requeue_only_those_are_excluded_that_are_bad_by_then() -> None:
    world = training(nodes=2, spares=1)
    for node in ("n0", "n1"):
        world.crash(node)
        world.run_for(8)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert excluded(world) == ("n0", "n1")
    for node in ("n0", "n1"):
        world.repair(node)
    steps(world, 3)
    for node in [seat.node for seat in world.gang.roster.seats]:
        world.crash(node)
        world.run_for(8)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_for(5)
    assert len(excluded(world)) == 2


def test_a_node_that_is_repaired_before_the_requeue_is_not_excluded() -> None:
    """Otherwise a job that needs all nodes would wait for the end of an exclusion."""
    world = training(nodes=2, spares=1)
    world.crash("n2")
    steps(world, 2)
    world.repair("n2")
    world.run_until(lambda: world.core.state.node("n2").health is NodeHealth.FIT)
    world.crash("n0")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_for(5)
    assert excluded(world) == ("n0",)


def test_nodes_that_the_user_excluded_stay_excluded() -> None:
    assert updated_exclusions(("n9",), ["n1"], []) == ("n9", "n1")
    assert updated_exclusions(("n9", "n1"), [], ["n1"]) == ("n9",)
    assert updated_exclusions(("n1",), ["n1", "n2"], ["n1"]) == ("n1", "n2")
    assert updated_exclusions(("n1",), [], ["n1"]) == ()


def test_a_node_that_never_was_out_of_service_is_excluded_for_a_while() -> None:
    world = training(nodes=2, spares=0)
    world.kill_agent("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    at = world.now
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.run_until(lambda: bool(calls(world, "admit")), 700)
    assert world.now - at >= EXCLUSION_S
    world.run_until(lambda: world.gang.newest.generation == 2, 60)


def test_a_job_of_which_too_few_nodes_are_left_in_service_is_requeued_before_it_has_gathered() -> None:
    world = Scenario(2, 1, absent=["n2"], gather_timeout_s=300.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.signal("n0")
    world.signal("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 10)
    assert calls(world, "requeue")[0].exclude == ("n0", "n1")


def test_it_fails_where_it_may_not_be_requeued() -> None:
    world = Scenario(2, 0, absent=["n1"], requeue=False, gather_timeout_s=300.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.signal("n0")
    world.run_until(lambda: world.gang.final, 10)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 94)
    assert "no spare is left for n0, and the job may not be requeued" in world.gang.reason


def test_a_node_that_dies_before_it_attaches_costs_a_requeue_and_not_the_job() -> None:
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=40.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED or world.gang.final, 60)
    assert world.gang.phase is Phase.REQUEUED, world.gang.reason


NOBODY = ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(("absent", "left"), [(["n2", "n3"], 1), (NOBODY, 0)])
def test_a_batch_host_that_dies_while_nodes_gather_costs_a_requeue_and_not_the_job(
    absent: list[str], left: int
) -> None:
    """srun dies with its host: the missing agents are never launched, even if the host returns before Slurm notices."""
    world = Scenario(3, 1, absent=absent, gather_timeout_s=300.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING and len(world.gang.roster.members) == 4 - len(absent))
    world.run_for(1)
    world.crash("n0")
    world.run_for(3)
    world.world.boot("n0")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 40)
    assert f"{left} of 3 agents are attached, and the batch process of the job is silent" in world.slurm[0].text
    assert world.slurm[0].exclude == ()


def test_a_job_without_a_launcher_is_requeued_in_the_end() -> None:
    """The coordinator was away and has not heard the batch script, which may be about to launch the agents."""
    world = Scenario(3, 1, absent=NOBODY, gather_timeout_s=50.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.crash("n0")
    world.restart_coordinator()
    world.world.boot("n0")
    world.run_for(49)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 2)
    words = "0 of 3 nodes attached within 50 s, and nothing was heard from the batch process of the job"
    assert world.slurm[0].text == f"muster: {words}"


def test_a_batch_script_that_starts_long_after_its_job_is_detected_as_lost_as_soon() -> None:
    world = Scenario(3, 1, absent=NOBODY, gather_timeout_s=300.0, launch_s=8.0)
    world.run_for(13)
    assert world.core.observed.gang("g").batch is not None
    world.crash("n0")
    world.run_for(3)
    world.world.boot("n0")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 60)


def test_a_batch_script_of_the_run_before_does_not_hide_the_one_that_runs() -> None:
    world = Scenario(3, 1, absent=["n2", "n3"], gather_timeout_s=300.0)
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    world.requeue()
    world.run_until(lambda: world.gang.slurm.restart_count == 1 and len(world.gang.roster.members) == 2)
    for _ in range(60):
        world.run_for(1)
        world.post_event(events.BatchHeartbeat("g", 1, 0))
    assert world.gang.phase is Phase.GATHERING


def test_in_observe_mode_late_agents_have_all_their_time() -> None:
    limits = replace(NO_LIMITS, observe=True)
    world = Scenario(3, 1, absent=["n2", "n3"], gather_timeout_s=300.0, limits=limits)
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    world.cut(("n0", "coordinator"), ("coordinator", "n0"))
    world.run_for(100)
    assert world.gang.phase is Phase.GATHERING


def test_the_gather_timeout_starts_with_the_first_agent() -> None:
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=40.0, launch_s=30.0)
    world.run_for(69)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.final, 5)
    assert world.gang.exit_code == 95


def test_a_job_that_slurm_puts_back_to_pending_is_not_given_up() -> None:
    """Slurm's controller has restarted from its saved state."""
    world = Scenario(2, 0, absent=["n0", "n1"], gather_timeout_s=40.0)
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, None))
    world.run_for(100)
    assert world.gang.phase is Phase.GATHERING
    world.post_event(events.SlurmJobChanged("g", 1, ("n0", "n1"), 0, None))
    world.run_for(39)
    assert world.gang.phase is Phase.GATHERING


@pytest.mark.parametrize("after_s", [0, 1, 2, 3, 4])
def test_a_job_that_starts_on_a_node_just_repaired_has_its_node(after_s: int) -> None:
    """Slurm starts the job at once. The coordinator observes the repair of the node a few seconds later."""
    world = Scenario(1, 0, idle_nodes=1, launch_s=4.0)
    world.run_until(lambda: world.is_running(1))
    world.signal("n1")
    world.run_until(lambda: world.world.cluster.nodes()["n1"].drained)
    world.world.submit(JobSubmission("h", events.GangSpec(1, 0, requeue=False)))
    world.run_for(10 + after_s)
    world.repair("n1")
    world.run_until(lambda: world.core.state.gangs["h"].newest.stepped_generation == 1, 30)


def test_a_reason_names_no_agent_that_is_attached() -> None:
    world = Scenario(2, 1, absent=["n1", "n2"], gather_timeout_s=40.0)
    world.run_until(lambda: len(world.gang.roster.members) == 1)
    world.signal("n0")
    world.run_until(lambda: world.gang.final, 50)
    assert "have ended" not in world.gang.reason


def test_a_coordinator_that_is_cut_off_itself_excludes_no_node() -> None:
    world = Scenario(3, 1, absent=["n2", "n3"], gather_timeout_s=90.0)
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    world.world.slurmd_connected.update(NOBODY)
    for node in NOBODY:
        world.cut((node, "coordinator"), ("coordinator", node))
    world.run_for(80)
    assert world.gang.phase is Phase.GATHERING
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 20)
    assert world.slurm[0].exclude == ()


def test_a_job_whose_agents_are_never_launched_is_not_requeued_for_ever() -> None:
    world = Scenario(3, 1, absent=NOBODY, gather_timeout_s=100.0)
    for times in (1, 2):
        world.run_until(lambda: world.gang.phase is Phase.GATHERING)
        world.run_for(1)
        world.crash("n0")
        world.run_for(3)
        world.world.boot("n0")
        world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 40)
        assert world.gang.slurm.runs_without_start == times
    world.run_until(lambda: world.gang.phase is Phase.GATHERING)
    world.crash("n0")
    world.run_for(3)
    world.world.boot("n0")
    world.run_until(lambda: world.gang.final, 110)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 95)


def test_a_job_whose_batch_script_lives_fails_where_its_agents_do_not_come() -> None:
    world = Scenario(3, 1, absent=["n2", "n3"], gather_timeout_s=100.0)
    world.run_until(lambda: world.gang.final, 110)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 95)
    assert "2 of 3 nodes attached within 100 s; missing: n2, n3." in world.gang.reason


def test_a_batch_script_that_stands_still_for_a_moment_is_waited_for() -> None:
    world = Scenario(3, 1, absent=["n2", "n3"], gather_timeout_s=300.0)
    world.run_until(lambda: len(world.gang.roster.members) == 2)
    world.run_for(40)
    world.pause("n0")
    world.run_for(14)
    world.resume("n0")
    world.run_for(60)
    assert world.gang.phase is Phase.GATHERING


def test_agents_that_end_while_others_are_awaited_cost_a_requeue_and_not_the_job() -> None:
    world = Scenario(3, 1, absent=["n2"], gather_timeout_s=40.0)
    world.run_until(lambda: len(world.gang.roster.members) == 3)
    world.kill_agent("n3")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 50)
    assert "the agents on n3 have ended, and were not started again" in world.gang.reason


@pytest.mark.parametrize("seen", ["runs again", "is back in the queue"])
def test_a_late_refusal_of_a_requeue_does_not_end_a_job_that_came_back_by_itself(seen: str) -> None:
    world = training(nodes=2, spares=0)
    world.world.slurm.error_rate = 1.0  # so the call goes on being owed
    world.kill_agent("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    call = calls(world, "requeue")[0].call
    world.requeue()
    if seen == "runs again":
        world.run_until(lambda: world.gang.newest.generation == 2, 300)
    else:
        world.post_event(events.SlurmJobChanged("g", 1, (), 1, None))
    world.post_event(events.SlurmAnswered("g", call, "Requested operation is presently disabled"))
    assert call not in world.core.state.owed
    assert not world.gang.final


def test_a_node_of_the_pool_goes_back_where_slurm_requeues_a_job_of_which_nobody_is_left() -> None:
    world = Scenario(3, 0, idle_nodes=1, limits=Limits(pool=POOL), pool_nodes=1)
    steps(world, 1)
    world.signal("n1")
    steps(world, 2)
    pool_job = next(iter(world.gang.growth.pool.values())).job
    world.post_event(events.SlurmJobChanged("g", 1, (), 1, None))
    for node in world.gang.roster.members:
        world.kill_agent(node)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert not world.gang.growth.pool
    assert [call.job for call in calls(world, "cancel")] == [pool_job]


def test_a_requeue_that_slurm_refuses_ends_a_job_that_waits_for_it() -> None:
    world = training(nodes=2, spares=0)
    world.world.slurm.error_rate = 1.0  # so the call goes on being owed
    world.crash("n1")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.post_event(
        events.SlurmAnswered("g", calls(world, "requeue")[0].call, "Requested operation is presently disabled")
    )
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 94)


def test_an_agent_of_the_run_before_that_is_admitted_late_does_not_join() -> None:
    core = Core(DurableState(), 0.0)
    core.decide(events.GangSubmitted("g", 1, 1, "", events.GangSpec(3, 0), "{}"), 0.0)
    for node, restarts, incarnation in (("n0", 0, "a"), ("n2", 1, "b"), ("n1", 0, "a")):
        core.decide(
            events.AgentAttached("g", node, 1, restarts, incarnation, "a:1", False, "", events.AgentStatus()), 1.0
        )
    assert list(core.state.gangs["g"].roster.members) == ["n2"]


def test_no_generation_starts_while_srun_still_waits_for_a_dead_spare() -> None:
    """srun gives up in the end, and then ends all agents."""
    world = Scenario(2, 1, absent=["n2"], gather_timeout_s=300.0)
    world.run_for(1)
    world.pause("n2")
    world.run_for(60)
    assert world.gang.phase is Phase.GATHERING
    world.relaunch_agents("n0", "n1")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 30)


def launch_fails(world: Scenario, *nodes: str) -> None:
    """The batch process says that srun could start nothing on these nodes."""
    world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, world.gang.slurm.restart_count, nodes))


@pytest.mark.parametrize(("spares", "ends"), [(0, True), (1, False)])
def test_a_launcher_that_fails_on_one_node_ends_the_launch_unless_spares_suffice(spares: int, ends: bool) -> None:
    world = Scenario(2, spares, absent=["n1"], own_nodes=("n0", "n1"), gather_timeout_s=300.0)
    world.run_until(lambda: "n0" in world.gang.roster.members and bool(world.gang.slurm.job_nodes))
    world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, 0, failed=(("n0", 1), ("n1", 7))))
    world.run_for(1)
    assert world.gang.final is ends
    assert world.gang.exit_code == (7 if ends else 0)
    assert calls(world, "requeue") == []


def test_no_generation_starts_while_a_prolog_hangs_on_a_spare() -> None:
    """srun gives up after some time, and then ends all agents, although the node lives."""
    world = Scenario(2, 1, absent=["n2"], gather_timeout_s=300.0)
    world.run_for(60)
    assert world.gang.phase is Phase.GATHERING
    world.relaunch_agents("n0", "n1")
    launch_fails(world, "n2")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 5)


def test_a_gang_without_a_batch_process_waits_for_no_launch() -> None:
    """`muster run --local` has none."""
    core = Core(DurableState(), 0.0)
    core.decide(events.GangSubmitted("g", 1, 1, "", events.GangSpec(2, 1), "{}"), 0.0)
    core.decide(events.SlurmJobChanged("g", 1, ("n0", "n1", "n2"), 0, None), 0.0)
    for node in ("n0", "n1"):
        core.decide(events.AgentAttached("g", node, 1, 0, node, "a:1", False, "", events.AgentStatus()), 1.0)
    core.decide(events.Tick(), 29.0)
    assert core.state.gangs["g"].phase is Phase.GATHERING
    core.decide(events.Tick(), 40.0)
    assert core.state.gangs["g"].phase is Phase.PREFLIGHT


@pytest.mark.parametrize("requeue", [True, False])
def test_a_job_whose_node_lets_srun_start_nothing_does_not_start_on_it_again(requeue: bool) -> None:
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=300.0, requeue=requeue)
    world.run_for(40)
    launch_fails(world, "n1")
    assert world.gang.phase is (Phase.REQUEUED if requeue else Phase.FAILED)
    assert world.gang.reason.startswith("srun could start nothing on n1, where a Prolog may hang: slurmd's log")
    assert [call.exclude for call in calls(world, "requeue")] == [("n1",)] * requeue
    assert world.core.state.node("n1").health is NodeHealth.FIT


def test_a_job_whose_node_starts_no_agent_does_not_start_on_it_again() -> None:
    """A TaskProlog fails there, or muster-agent is missing."""
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=300.0)
    world.run_for(5)
    world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, 0, failed=(("n1", 7),)))
    assert world.gang.phase is Phase.REQUEUED
    assert world.gang.reason.startswith("no agent could start on n1 (exit code 7): slurm-1.out says why")
    assert [call.exclude for call in calls(world, "requeue")] == [("n1",)]
    assert world.core.state.node("n1").health is NodeHealth.FIT


def test_a_spare_that_srun_gave_up_before_any_agent_attached_is_awaited_no_longer_than_another() -> None:
    world = Scenario(2, 1, absent=["n2"], gather_timeout_s=300.0)
    world.run_for(40)
    assert world.gang.phase is Phase.GATHERING
    launch_fails(world, "n2")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING, 5)


def test_a_failed_launch_on_a_dead_node_does_not_speak_of_its_prolog() -> None:
    world = Scenario(2, 0, absent=["n1"], gather_timeout_s=300.0)
    world.run_for(1)
    world.pause("n1")
    world.run_for(25)  # before Slurm takes the node out
    launch_fails(world, "n1")
    assert "srun could start nothing on n1, where the node daemon is silent, too" in world.gang.reason


def test_nodes_that_share_the_cause_of_a_failed_launch_are_not_excluded() -> None:
    world = Scenario(4, 0, absent=["n1", "n2", "n3"], gather_timeout_s=300.0)
    world.run_for(40)
    launch_fails(world, "n1", "n2", "n3")
    (call,) = calls(world, "requeue")
    assert call.exclude == ()
    assert "srun could start nothing on n1 n2 n3" in call.text


def test_a_launch_that_failed_is_no_reason_for_a_requeue_after_the_start() -> None:
    """The batch process names the node for as long as the job runs."""
    world = Scenario(2, 1, absent=["n2"], gather_timeout_s=300.0)
    world.run_for(60)
    world.relaunch_agents("n0", "n1")
    launch_fails(world, "n2")
    steps(world, 1)
    world.crash("n1")
    while world.gang.phase is not Phase.REQUEUED:
        launch_fails(world, "n2")
        world.run_for(0.1)
    assert world.gang.reason == "no spare is left for n1: requeue"
    assert [call.exclude for call in calls(world, "requeue")] == [("n1",)]


def test_a_job_that_srun_can_start_nowhere_is_not_requeued_for_ever() -> None:
    world = Scenario(2, 0, idle_nodes=9, gather_timeout_s=300.0)
    world.world.jobs.unstartable_nodes.update(f"n{at}" for at in range(1, 11))
    runs = 0
    while not world.gang.final:
        world.run_until(lambda: world.gang.phase is Phase.GATHERING and len(world.gang.slurm.job_nodes) == 2, 200)
        launch_fails(world, world.gang.slurm.job_nodes[1])
        runs += 1
    assert (runs, world.gang.phase) == (3, Phase.FAILED)
    assert "srun could start nothing on " in world.gang.reason


def test_where_srun_can_start_nothing_on_its_own_node_the_job_is_not_requeued() -> None:
    world = Scenario(2, 0, absent=["n0", "n1"], gather_timeout_s=300.0)
    world.run_for(10)
    assert world.core.observed.gang("g").batch_host == "n0"
    launch_fails(world, "n0", "n1")
    assert world.gang.phase is Phase.GATHERING


def test_no_node_is_excluded_before_the_node_of_srun_has_shown_that_agents_can_start() -> None:
    """A Python that all nodes share is broken, and the task of n1 is seen to fail first."""
    world = Scenario(3, 0, absent=["n0", "n1", "n2"], gather_timeout_s=300.0)
    world.run_for(10)
    for failed in ((("n1", 1),), (("n0", 1), ("n1", 1), ("n2", 1))):
        world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, 0, failed=failed))
        assert world.gang.phase is Phase.GATHERING
        world.run_for(2)
    assert calls(world, "requeue") == []


def test_agents_that_all_end_at_once_exclude_none_of_their_nodes() -> None:
    world = training(nodes=3, spares=0)
    for node in ("n0", "n1", "n2"):
        world.kill_agent(node)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert calls(world, "requeue")[0].exclude == ()
    words = "3 of 3 agents are gone (muster-agent on n0 has ended); slurm-1.out says why, if Slurm has ended them"
    assert words in calls(world, "requeue")[0].text


def test_a_users_own_script_goes_on_whose_launch_has_lost_nothing_but_its_agents() -> None:
    """A user's signal has ended them. The shell may be one of salloc, which has more to do on these nodes."""
    world = training(nodes=3, spares=0, own_nodes=("n0", "n1", "n2"), requeue=False)
    for node in ("n0", "n1", "n2"):
        world.kill_agent(node)
    world.run_until(lambda: world.gang.final)
    world.run_for(120.0)
    assert calls(world, "complete") == []


def test_a_finished_gangs_job_that_slurm_has_queued_again_can_be_cancelled() -> None:
    world = training(nodes=2, spares=0)
    world.finish()
    world.run_until(lambda: world.gang.final)
    world.post_event(events.CancelRequested("g", "uid 1000"))
    assert [call.job for call in calls(world, "cancel")] == [world.gang.slurm.job]


def test_a_node_of_the_pool_that_dies_where_nobody_is_left_to_ask_is_given_up_when_slurm_has_it_down() -> None:
    world = Scenario(2, 0, idle_nodes=1, limits=Limits(pool=POOL), pool_nodes=1)
    steps(world, 1)
    world.crash("n1")
    steps(world, 2)
    assert {seat.node for seat in world.gang.roster.seats} == {"n0", "n2"}
    world.power_off("n2")
    world.signal("n0")
    world.run_until(lambda: bool(world.gang.roster.members["n0"].removal_reason))
    world.run_until(lambda: bool(world.gang.roster.members["n2"].removal_reason), 120)
    assert world.gang.roster.members["n2"].removal_reason == "n2 is silent, and Slurm has taken it out of the job"
    assert world.core.state.node("n2").health is NodeHealth.FIT, "one witness is none"
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)


def test_a_member_of_the_pool_that_carries_no_rank_again_gives_its_pool_job_back() -> None:
    world = Scenario(2, 0, idle_nodes=2, limits=replace(NO_LIMITS, pool=POOL), durable_dir="/durable", pool_nodes=2)
    steps(world, 1)
    world.crash("n1")
    steps(world, 2)
    member = next(member for member in world.gang.roster.present() if member.job != world.gang.slurm.job)
    world.signal(member.node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 3, 120)
    world.run_for(2)
    assert [call.job for call in calls(world, "cancel")] == [member.job]
    assert calls(world, "let_go") == []


def test_an_agent_joins_from_the_pool_only_with_its_own_open_request() -> None:
    world = training(nodes=2, spares=0)
    gang = world.gang
    gang.growth.pool[1] = PoolRequest(1, "n0", ())
    assert refusal(gang, 1, 7, "n5") == ""
    gang.growth.pool[1] = PoolRequest(1, "n0", (), job=7, node="n5")
    assert refusal(gang, 1, 7, "n5") == ""
    words = "no node of the pool is wanted any more"
    assert refusal(gang, 1, 8, "n5") == words, "the job of another request"
    assert refusal(gang, 1, 7, "n6") == words, "a second node of one job"
    assert refusal(gang, 2, 7, "n5") == words, "an unknown request"
    assert refusal(None, 1, 7, "n5") == words, "an unknown gang"
    world.post_event(events.CancelRequested("g", "uid 1000"))
    gang.growth.pool[1] = PoolRequest(1, "n0", ())
    assert refusal(gang, 1, 7, "n5") == words, "a gang that is over"
