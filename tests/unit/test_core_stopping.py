"""Planned stops: what a gang does when Slurm is about to end its job, in simulated worlds."""

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.scenario import Scenario
from muster.slurm.client.states import JobState


def training(steps: int = 3, **given: object) -> Scenario:
    world = Scenario(4, 2, **{"durable_dir": "/durable", **given})  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= steps)
    return world


def verbs(world: Scenario) -> list[str]:
    return [call.verb for call in world.slurm]


def durable(world: Scenario) -> int:
    version = world.gang.checkpoint.durable_version
    return version.step if version else 0


def stopped_at(world: Scenario) -> int:
    """The last step that any rank has finished."""
    ranks = [rank for seat in world.gang.roster.seats for rank in world.agent(seat.node).ranks.values()]
    return max((rank.step for rank in ranks), default=0)


def test_before_the_time_limit_the_ranks_stop_their_last_step_is_written_and_the_job_ends() -> None:
    world = training(time_limit_s=60, stop_before_s=10.0)
    world.run_until(lambda: world.gang.plans.stop is not None)
    assert world.now - world.gang.account.registered_at == pytest.approx(50, abs=1)
    last = stopped_at(world)
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert "time limit" in world.gang.reason
    assert last <= durable(world) <= last + 1
    assert world.now - world.gang.account.registered_at < 53
    assert [fact.action for fact in world.facts(facts.GenerationStarted)] == ["start"]


def test_a_job_that_wants_it_is_requeued_at_its_time_limit_and_goes_on_from_there() -> None:
    world = training(time_limit_s=60, stop_before_s=10.0, requeue_at_limit=True)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert verbs(world) == ["requeue"]
    saved = durable(world)
    world.run_until(lambda: world.gang.newest.generation == 2, 300)
    assert world.facts(facts.GenerationStarted)[-1].version == world.gang.checkpoint.durable_version
    world.run_until(lambda: stopped_at(world) > saved)
    assert world.gang.plans.stop is None


def test_at_most_a_quarter_of_a_short_job_is_reserved_for_the_stop() -> None:
    world = training(time_limit_s=20, stop_before_s=120.0)
    world.run_until(lambda: world.gang.plans.stop is not None)
    assert world.now - world.gang.account.registered_at == pytest.approx(15, abs=1)


def test_sigterm_that_a_short_script_has_asked_for_before_its_limit_is_none_of_a_preemption() -> None:
    """`--signal=TERM@30` of a job of 5 minutes: Slurm sends it up to 90 s before the limit, the own stop is at 75 s."""
    for before_s, phase in ((100, Phase.REQUEUED), (90, Phase.FAILED)):
        world = training(time_limit_s=300, stop_before_s=90.0)
        limit_at = world.core.observed.gang("g").limit_at
        assert limit_at is not None
        world.run_for(limit_at - before_s - world.now)
        world.sigterm()
        world.run_until(lambda world=world: world.gang.plans.stop is not None, 5)
        world.run_until(lambda world=world: world.gang.final or world.gang.phase is Phase.REQUEUED)
        assert (world.gang.phase, durable(world)) == (phase, stopped_at(world))


def test_a_job_without_stop_before_trains_to_the_limit_and_saves_within_killwait() -> None:
    world = training(time_limit_s=60, stop_before_s=0.0)
    world.run_until(lambda: world.gang.plans.stop is not None)
    assert world.now - world.gang.account.registered_at >= 60
    last = stopped_at(world)
    world.run_until(lambda: world.gang.final)
    assert world.gang.phase is Phase.FAILED
    # Slurm's word for the end and its SIGTERM come in either order.
    assert world.gang.exit_code == (1 if "TIMEOUT" in world.gang.reason else 98)
    assert durable(world) >= last
    assert verbs(world) == []


def test_a_preempted_job_is_saved_in_its_grace_time_and_requeued() -> None:
    world = training()
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 5)
    assert durable(world) == stopped_at(world) > 3
    assert verbs(world) == ["requeue"]
    assert "SIGTERM" in world.gang.reason
    world.run_until(lambda: not any(world.agent(f"n{i}").alive for i in range(6)), 2)


def test_a_preempted_job_that_may_not_be_requeued_ends() -> None:
    world = training(requeue=False)
    world.sigterm()
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert durable(world) == stopped_at(world)


def test_a_launch_that_its_user_ends_is_saved_and_its_job_goes_on() -> None:
    world = training()
    world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, 0, interrupted="SIGTERM"))
    world.run_until(lambda: world.gang.final)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert "the user has sent SIGTERM to the launch" in world.gang.reason
    assert durable(world) == stopped_at(world) > 3
    assert verbs(world) == []


def test_what_slurm_ends_is_not_taken_for_the_users() -> None:
    """Slurm's SIGTERM reaches the launch, too."""
    world = training()
    world.sigterm()
    world.run_until(lambda: world.gang.plans.stop is not None)
    world.post_event(events.BatchHeartbeat("g", world.gang.slurm.job, 0, interrupted="SIGTERM"))
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 5)
    assert verbs(world) == ["requeue"]


def test_a_job_that_slurm_requeues_is_saved_and_not_requeued_twice() -> None:
    world = training()
    world.requeue()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 10)
    assert durable(world) == stopped_at(world) > 3
    assert verbs(world) == []
    world.run_until(lambda: world.gang.newest.generation == 2, 300)
    assert world.facts(facts.GenerationStarted)[-1].version == world.gang.checkpoint.durable_version


def test_a_stop_waits_for_the_only_copy_whose_agent_has_just_lost_its_stream() -> None:
    """The node was left, and holds the shard of the only rank until the next node has it."""
    world = Scenario(1, 1, durable_dir="/durable", copy_s=60.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 3)
    world.signal("n0")
    world.run_until(lambda: world.gang.newest.generation == 2)
    world.sigterm()
    world.run_until(lambda: world.gang.plans.stop is not None)
    world.kill_rank("n1")
    stream = world.agent("n0").stream
    assert stream is not None
    stream.reset()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 30)
    started = world.facts(facts.GenerationStarted)[-1]
    assert started.version is not None
    assert durable(world) == started.version.step


def test_without_a_durable_folder_the_ranks_are_asked_to_stop_all_the_same() -> None:
    world = training(durable_dir="")
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 5)
    assert all(world.agent(seat.node).ranks[seat.group_rank].exit_code == 0 for seat in world.gang.roster.seats)


@pytest.mark.parametrize("after", [0.3, 0.7, 1.0, 1.3, 1.7])
def test_scancel_is_no_requeue_whenever_slurm_is_looked_at(after: float) -> None:
    """The agents get the signal at once. The coordinator learns of it when it next reads the job."""
    world = training()
    world.run_for(after)
    world.world.cluster.cancel(world.gang.slurm.job)
    world.run_until(lambda: world.gang.final, 60)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.CANCELLED, 130)
    world.run_for(10)
    assert world.world.cluster.jobs()[world.gang.slurm.job].state is JobState.CANCELLED


def test_sigterm_at_the_time_limit_is_the_limits() -> None:
    world = training(time_limit_s=60, stop_before_s=0.0)
    world.run_until(lambda: world.now - world.gang.account.registered_at > 58)
    world.sigterm()
    world.run_until(lambda: world.gang.final, 10)
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert verbs(world) == []


def test_scancel_saves_nothing() -> None:
    world = training()
    world.world.cluster.cancel(world.gang.slurm.job)
    world.run_until(lambda: world.gang.final, 5)
    assert world.gang.phase is Phase.CANCELLED
    assert durable(world) == 0


def test_sigterm_to_one_node_costs_it_its_place_and_nothing_else() -> None:
    world = training()
    world.sigterm("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert "n1" not in [seat.node for seat in world.gang.roster.seats]
    assert world.core.state.node("n1").health is NodeHealth.FIT
    assert world.gang.plans.stop is None
    assert "SIGTERM" in world.gang.recovery.recoveries[-1].cause


def test_ranks_that_do_not_stop_are_ended_and_what_they_have_kept_is_written() -> None:
    world = training()
    for agent in world.world.agents.values():
        agent.ranks_ignore_stop = True
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING, 20)
    last = stopped_at(world)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert durable(world) >= last - 1
    assert world.gang.recovery.failures_in_a_row == 0
    assert world.gang.newest.generation == 1


def test_a_rank_that_fails_as_it_stops_is_no_fault_of_the_software() -> None:
    world = training()
    world.sigterm()
    world.run_until(lambda: world.gang.plans.stop is not None)
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.recovery.failures_in_a_row == 0
    assert durable(world) >= 3


def test_a_gang_that_still_gathers_is_requeued_at_once() -> None:
    world = Scenario(4, 2, absent=["n5"])
    world.run_until(lambda: len(world.gang.roster.present()) == 5)
    world.sigterm("n0", "n1", "n2", "n3", "n4")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 2)
    assert verbs(world) == ["requeue"]


def test_a_gang_that_recovers_is_stopped_without_a_further_generation() -> None:
    world = training()
    world.power_off("n1")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.sigterm("n0", "n2", "n3", "n4", "n5")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert world.gang.newest.generation == 1
    assert durable(world) >= 3


def test_a_requeued_job_goes_on_though_killwait_ends_before_its_state_is_written() -> None:
    world = training(flush_s=100.0)
    world.requeue()
    world.run_until(lambda: world.gang.phase is Phase.DRAINING, 10)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 60)
    assert world.gang.checkpoint.flush is not None
    assert "went while it was written" in world.gang.checkpoint.flush.error
    assert durable(world) == 0
    assert not any(world.core.state.node(f"n{i}").health in (NodeHealth.LOST, NodeHealth.HUNG) for i in range(6))


def test_a_cancel_during_a_stop_ends_it_at_once() -> None:
    world = training(flush_s=100.0)
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.DRAINING)
    world.post_event(events.CancelRequested("g", "uid 1000"))
    assert world.gang.phase is Phase.CANCELLED


def test_what_nodes_that_are_out_still_hold_is_saved_before_the_requeue() -> None:
    """One of two agents reports an error, the other node is cut off, and Slurm requeues the job."""
    world = Scenario(2, 0, durable_dir="/durable")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 3)
    agent = world.agent("n0")
    agent.failure = "no space left on device"
    agent.status_changed()
    world.cut(("n0", "n1"), (COORDINATOR, "n1"))
    world.run_until(lambda: bool(world.gang.roster.members["n0"].removal_reason))
    world.requeue()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 30)
    assert durable(world) >= 3


def test_a_version_that_comes_to_stand_whole_while_an_older_one_is_written_is_written_too() -> None:
    world = training(flush_s=2.0)
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.DRAINING)
    flush = world.gang.checkpoint.flush
    assert flush is not None
    late = events.Version(flush.version.generation, flush.version.step + 1)
    for seat in world.gang.roster.seats:
        world.agent(seat.node).memory.store_step(late.generation, late.step, [seat.group_rank])
        world.agent(seat.node).status_changed()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED, 30)
    assert world.gang.checkpoint.durable_version == late


def test_the_time_limit_of_the_earlier_run_stops_no_rank() -> None:
    """Agents of a requeued job may attach before Slurm reports the new run."""
    world = training(time_limit_s=60, stop_before_s=10.0, requeue_at_limit=True)
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_until(lambda: world.gang.slurm.restart_count == 1, 300)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, None, limit_at=world.now + 1.0, limit_s=60.0))
    world.run_for(0.5)
    assert world.core.observed.gang("g").job_restarts == 0
    assert len(world.facts(facts.StopPlanned)) == 1


def test_a_job_that_slurm_has_ended_is_saved_while_its_agents_live() -> None:
    world = training()
    last = stopped_at(world)
    world.post_event(events.SlurmJobChanged("g", 1, (), 0, "TIMEOUT"))
    assert not world.gang.final
    world.run_until(lambda: world.gang.final)
    assert durable(world) >= last
    assert (world.gang.phase, world.gang.reason) == (Phase.FAILED, "Slurm ended job 1: TIMEOUT")
    assert verbs(world) == []
