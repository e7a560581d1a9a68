"""Nodes that leave their job while the gang runs: no agent says anything about such a node any more."""

import subprocess

import pytest

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.limits import Limits, Pool
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.state_tables import FENCING, Phase
from muster.daemon.coordinator.core.turn.state_index import StateIndex
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.host import process_tree
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def training(spares: int = 1, **more: object) -> Scenario:
    world = Scenario(4, spares, **more)  # type: ignore[arg-type]
    trains(world, 1)
    return world


def trains(world: Scenario, generation: int) -> None:
    world.run_until(lambda: world.is_running(generation) and world.gang.newest.stepped_generation == generation)


def judged(world: Scenario) -> list[str]:
    """Nodes whose health has changed, or that Slurm was asked to take out of service."""
    calls = [call.node for call in world.slurm if call.verb in ("drain", "down")]
    return [*(fact.node for fact in world.facts(facts.NodeJudged)), *calls]


def keep_rogue_agent(world: Scenario, node: str) -> None:
    """The owner keeps the agent on `node` out of Slurm's reach: it outlives the job there, and withholds its fence."""
    world.agent(node).is_rogue = True


def test_a_node_that_is_given_back_costs_one_swap_and_is_not_blamed() -> None:
    world = training()
    world.give_back("n1")
    trains(world, 2)
    assert "n1" not in {seat.node for seat in world.gang.roster.seats}
    assert [recovery.action for recovery in world.gang.recovery.recoveries] == ["swap"]
    assert world.gang.roster.members["n1"].gone
    assert judged(world) == []


def test_the_status_says_that_slurm_has_ended_an_agent_with_its_node() -> None:
    world = training()

    def shown() -> list[str]:
        view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
        return [node.reason for node in view.nodes if node.node == "n1"]

    world.kill_agent("n1")
    trains(world, 2)
    assert shown() == ["muster-agent on n1 has ended"]
    world.give_back("n1")
    world.run_for(3)
    assert shown() == ["muster-agent on n1 has ended; job 1 no longer has n1"]


def test_an_agent_that_stays_on_a_node_that_was_given_back_has_nobody_blamed() -> None:
    world = training()
    keep_rogue_agent(world, "n1")
    world.give_back("n1")
    world.run_for(5)
    assert world.gang.roster.members["n1"].removal_reason == "job 1 no longer has n1"
    assert ("g", "n1") not in world.world.coordinator.agent_streams
    world.kill_rank("n0")
    world.run_for(60)
    assert world.gang.phase is Phase.RUNNING
    assert judged(world) == []
    assert world.core.state.node("n1").health is NodeHealth.FIT
    assert world.replayed_state() == world.core.state


def test_a_fence_that_is_withheld_just_before_the_node_is_given_back_drains_nothing() -> None:
    world = training()
    keep_rogue_agent(world, "n1")
    world.kill_rank("n0")
    world.run_until(lambda: bool(world.slurm) and world.slurm[0].if_run_has_node == 0)
    world.give_back("n1")
    trains(world, 2)
    world.run_for(10)
    assert [call.verb for call in world.slurm] == ["drain", "let_go"]
    assert "job 1 no longer has this node" in world.facts(facts.SlurmCallSettled)[0].error
    assert not world.facts(facts.NodeJudged)
    assert not world.world.cluster.nodes()["n1"].drained


def test_ranks_that_can_not_be_killed_make_their_node_unfit_once_slurm_has_drained_it() -> None:
    world = training()
    world.world.slurm.unavailable_reason = "slurmctld is away"
    world.machines["n1"].ranks_unkillable_until = world.now + 12
    world.kill_rank("n0")
    trains(world, 2)
    assert world.core.state.node("n1").health is NodeHealth.FIT
    world.world.slurm.unavailable_reason = ""
    world.run_for(10)
    assert world.core.state.node("n1").health is NodeHealth.UNFIT
    assert world.core.state.node("n1").reason == "ranks on n1 could not be killed within 10 s"
    assert world.world.cluster.nodes()["n1"].drained
    assert world.replayed_state() == world.core.state


@pytest.mark.parametrize("rank_runs", [True, False])
@pytest.mark.parametrize(
    ("words", "is_shown"),
    [
        ("{left}", True),
        ("{left}; process 9 (a) (b) is in state D, in request_wait_answer and 3 more", True),
        ("{left}\nRMA this node", False),
        ("{left}; RMA this node", False),
        ("process 9 (all GPUs of this node are broken) is in state D", False),
        ("GPU 3 is broken: RMA this node", False),
        ("", False),
    ],
)
def test_a_node_is_drained_with_what_its_agent_says_of_processes_left_and_with_no_words_of_the_user(
    words: str, is_shown: bool, rank_runs: bool
) -> None:
    """A child of the rank may be what is left."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        words = words.format(left=process_tree.describe_unkilled(process.pid)[0])
        process.kill()
    world = training()
    world.machines["n1"].ranks_unkillable_until = world.now + 20
    (rank,) = world.agent("n1").ranks.values()
    rank.stderr = words
    world.kill_rank("n0")
    world.run_until(lambda: world.gang.phase in FENCING)
    rank.running = rank_runs
    trains(world, 2)
    world.run_for(10)
    said = "ranks on n1 could not be killed within 10 s"
    assert world.core.state.node("n1").reason == (f"{said}: {words}" if is_shown else said)


def test_where_a_limit_withholds_the_drain_the_node_is_not_blamed_either() -> None:
    world = training(limits=Limits(nodes_per_hour=0))
    keep_rogue_agent(world, "n1")
    world.kill_rank("n0")
    trains(world, 2)
    assert [(fact.node, fact.verb) for fact in world.facts(facts.ActionWithheld)] == [("n1", "drain")]
    assert judged(world) == []


def test_a_node_of_the_pool_leaves_with_its_pool_job() -> None:
    world = Scenario(3, 0, idle_nodes=2, pool_nodes=1, limits=Limits(pool=Pool(("--partition=shared",))))
    trains(world, 1)
    world.power_off("n1")
    trains(world, 2)
    (pool_job,) = [member.job for member in world.gang.roster.members.values() if member.job != world.gang.slurm.job]
    (node,) = world.world.cluster.jobs()[pool_job].nodes
    keep_rogue_agent(world, node)
    world.world.cluster.cancel(pool_job)
    world.run_until(lambda: world.gang.roster.members[node].gone)
    assert world.gang.roster.members[node].removal_reason == f"job {pool_job} no longer has {node}"
    assert judged(world) == ["n1", "n1"]


def test_while_slurm_has_the_node_down_the_failure_detector_decides() -> None:
    world = training(durable_dir="")
    world.cut(("coordinator", "n1"), ("n1", "coordinator"))
    world.run_for(60)
    assert "n1" not in world.world.cluster.jobs()[1].nodes
    assert world.gang.newest.generation == 1
    assert not world.gang.roster.members["n1"].removed


def test_a_removed_node_ends_its_stream_when_slurm_has_let_it_go() -> None:
    world = training()
    world.signal("n1")
    trains(world, 2)
    keep_rogue_agent(world, "n1")
    world.run_until(lambda: world.gang.roster.members["n1"].gone)
    assert world.gang.roster.members["n1"].removal_reason == "Xid 79"
    assert len(world.gang.recovery.recoveries[-1].nodes_out) == 1
    assert ("g", "n1") not in world.world.coordinator.agent_streams


# -- limits on what agents report --


def has_unkillable_ranks(world: Scenario, node: str) -> None:
    """The ranks on `node` outlive SIGKILL when the next generation is fenced."""
    world.machines[node].ranks_unkillable_until = world.now + 12
    world.kill_rank("n0")
    trains(world, world.gang.newest.generation + 1)


def test_what_agents_report_leaves_the_sites_limit_to_other_evidence() -> None:
    world = training(spares=2, limits=Limits(nodes_per_hour=1, nodes_at_least=1))
    has_unkillable_ranks(world, "n1")
    world.signal("n2")
    trains(world, 3)
    drained = [call.node for call in world.slurm if call.verb == "drain"]
    assert drained == ["n1", "n2"]


def test_a_job_that_reports_node_after_node_is_believed_up_to_its_limit() -> None:
    world = training(spares=2, limits=Limits(reported_drains_per_hour_of_job=1))
    has_unkillable_ranks(world, "n1")
    has_unkillable_ranks(world, "n2")
    (withheld,) = world.facts(facts.ActionWithheld)
    assert withheld.node == "n2"
    assert "1 node was drained within the hour for reports of this job's agents" in withheld.reason
    assert world.core.state.node("n2").health is NodeHealth.FIT


def test_the_reports_of_one_user_leave_other_users_theirs() -> None:
    state, limits = DurableState(), Limits(reported_drains_per_hour_of_user=2)
    for number, (gang, uid) in enumerate({"a": 1000, "b": 1000, "c": 2000}.items(), 1):
        apply(state, facts.GangRegistered(gang, number, uid, gang, GangSpec(1, 0), "{}"), 0.0)
    for number, gang in enumerate(("a", "b"), 1):
        apply(state, facts.SlurmCallOwed(gang, number, "drain", number, f"n{number}", "", if_run_has_node=0), 100.0)

    def withheld(gang: str, now: float) -> str:
        observed = ObservedState(observing_since=0.0)
        turn = Turn(state, observed, StateIndex(state, observed), now, limits=limits)
        return circuit_breaker.reason_to_withhold(turn, reported_by=state.gangs[gang])

    words = "2 nodes were drained within the hour for reports of this user's agents, and no more may be"
    assert withheld("a", 200.0) == words
    assert withheld("c", 200.0) == ""
    assert withheld("a", 3701.0) == ""
    assert state.taken_out_at == {}


# -- after a requeue --


def excluded(world: Scenario) -> tuple[str, ...]:
    """The nodes on which the requeued job may not start."""
    assert [call.verb for call in world.slurm][-1:] == ["requeue"]
    return tuple(sorted(world.world.cluster.jobs()[1].excluded))


def requeued_later(world: Scenario) -> tuple[str, ...]:
    """The gang loses a further node, for which there is no spare: the nodes on which its job may not start again."""
    trains(world, 2)
    world.run_for(5)
    world.signal("n3")
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED and not world.core.state.owed)
    return excluded(world)


def test_the_requeued_job_may_start_on_a_node_that_was_given_back() -> None:
    world = training()
    world.give_back("n1")
    assert requeued_later(world) == ("n3",)
    assert world.replayed_state() == world.core.state


def test_so_it_may_if_the_agent_there_did_not_end() -> None:
    world = training()
    keep_rogue_agent(world, "n1")
    world.give_back("n1")
    world.run_until(lambda: world.gang.roster.members["n1"].removal_reason == "job 1 no longer has n1")
    assert requeued_later(world) == ("n3",)


def test_a_node_whose_agent_ended_by_itself_stays_excluded() -> None:
    world = training()
    world.kill_agent("n1")
    assert requeued_later(world) == ("n1", "n3")


def test_a_node_that_fails_after_it_was_given_back_is_excluded() -> None:
    world = training()
    world.give_back("n1")
    trains(world, 2)
    world.signal("n1")
    assert requeued_later(world) == ("n1", "n3")
