"""Replicas that disagree in a simulated gang: who is named, what is restored, and what happens to the node."""

from dataclasses import replace
from functools import partial

import pytest
from tests.unit import training_worlds

from muster.daemon.coordinator.core.detection.corruption_detector import MOST_CORRUPT_COPIES, MOST_DISAGREEMENTS
from muster.daemon.coordinator.core.recovery import restore_plan
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import Shard, Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.shell.orders import Orders
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.agent import Rank
from muster.v1 import api_pb2

training = partial(training_worlds.training, spares=1)


def carrying(world: Scenario) -> list[str]:
    return [seat.node for seat in sorted(world.gang.roster.seats, key=lambda seat: seat.group_rank)]


def live_ranks(world: Scenario) -> list[Rank]:
    return [rank for node in carrying(world) for rank in world.agent(node).ranks.values() if rank.alive]


def flips_of(world: Scenario) -> set[int]:
    return {rank.flip for rank in live_ranks(world)}


def view(world: Scenario) -> api_pb2.GangView:
    return gang_view(world.core.state, world.core.observed, world.gang, world.now)


def shown(world: Scenario) -> str:
    return "\n".join(gang_details(view(world), Screen()))


def test_the_minority_names_its_node_and_a_spare_takes_the_seat() -> None:
    world = training()
    node = carrying(world)[2]
    world.flip_bit(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    (found,) = world.facts(facts.ReplicasDisagreed)
    step = found.version.step
    assert (found.generation, found.ranks, found.nodes, found.node) == (1, (2,), (node,), node)
    assert found.reason == (
        f"silent data corruption: rank 2 on {node} differs from 3 equal replicas in the parameters or optimizer states "
        f"of step {step}"
    )
    assert describe(found) == f"step {step} (generation 1) is void: {found.reason}"
    assert found.reason in shown(world)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out) == ("swap", [node])
    assert recovery.step_restored < step, "the last version on which all agreed"
    assert flips_of(world) == {0}


def test_only_the_job_leaves_the_node() -> None:
    """The attack: a user's processes claim that a node corrupts data, and Slurm drains it for everybody."""
    world = training()
    node = carrying(world)[2]
    world.flip_bit(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.run_for(5)
    assert world.core.state.node(node).health is NodeHealth.FIT
    assert {call.verb for call in world.slurm} == {"let_go"}
    world.requeue()
    world.run_for(2)
    assert world.gang.roster.members[node].removal_reason.startswith("silent data corruption")


def test_without_a_spare_the_ranks_restart_in_place() -> None:
    world = training(spares=0)
    before = carrying(world)
    world.flip_bit(before[2])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.recovery.recoveries[-1].action == "restart in place"
    assert carrying(world) == before
    assert flips_of(world) == {0}
    assert world.gang.recovery.failures_in_a_row == 0


def test_with_two_replicas_both_are_suspects_and_nobody_is_left() -> None:
    world = training(nodes=2)
    before = carrying(world)
    world.flip_bit(before[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    (found,) = world.facts(facts.ReplicasDisagreed)
    assert (found.ranks, found.nodes, found.node) == ((0, 1), tuple(before), "")
    assert found.reason == (
        f"replicas disagree: ranks 0 1 on {' '.join(before)} differ in the parameters or optimizer states of step "
        f"{found.version.step}, and nobody can tell which are right"
    )
    assert carrying(world) == before
    assert flips_of(world) == {0}


def test_a_minority_on_several_nodes_names_none() -> None:
    world = training(nodes=5, copy_s=0.5)
    for node in carrying(world)[3:]:
        world.flip_bit(node)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    (found,) = world.facts(facts.ReplicasDisagreed)
    assert (found.ranks, found.node) == ((3, 4), "")
    assert "differ from the majority" in found.reason
    assert found.reason.endswith("and no single node explains that")
    assert world.gang.recovery.recoveries[-1].nodes_out == []


def test_a_leader_that_is_lost_before_its_decision_arrives_restores_nothing_corrupt() -> None:
    """Every shard of the version has a replica, and no other agent knows that the version is void."""
    world = training()
    leader, flipped = carrying(world)[0], carrying(world)[2]
    world.flip_bit(flipped)
    world.run_until(lambda: world.agent(leader).memory.disagreement is not None)
    void = world.agent(leader).memory.disagreement
    world.power_off(leader)
    assert void is not None
    assert all(void.version in world.agent(node).memory.versions_of(rank) for rank, node in enumerate(carrying(world)))
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.restore.restored_version is not None
    assert world.gang.restore.restored_version < void.version
    assert flips_of(world) == {0}


def test_a_planned_swap_whose_leader_is_lost_restores_nothing_corrupt() -> None:
    """Both ranks have kept their last step in two copies, and nobody has compared it."""
    world = training(nodes=2)
    leader, flipped = carrying(world)
    world.run_for(6)
    world.swap(leader)
    world.flip_bit(flipped)
    world.run_until(lambda: all(rank.stopped_step for rank in live_ranks(world)))
    last = Version(1, world.agent(leader).ranks[0].stopped_step)
    world.run_until(lambda: last in world.agent(flipped).memory.versions_of(0))
    world.power_off(leader)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.restore.restored_version is not None
    assert world.gang.restore.restored_version < last
    assert flips_of(world) == {0}


def test_a_void_version_is_not_rebuilt_from_a_parity() -> None:
    """Only the leader knows that the version is void, and has freed the shard that differs. The parity has it still,
    and says nothing of its replicas."""
    world = training(nodes=3, group_nodes=3)
    leader, *others = carrying(world)
    world.flip_bit(leader)
    world.run_until(lambda: world.agent(leader).memory.disagreement is not None)
    void = world.agent(leader).memory.disagreement
    links = [pair for other in others for pair in ((leader, other), (other, leader))]
    world.cut(*links)
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    world.heal(*links)
    assert void is not None
    assert all(void.version in world.agent(node).memory.versions_of(rank) for rank, node in enumerate(others, 1))
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert world.gang.restore.restored_version is not None
    assert world.gang.restore.restored_version < void.version
    assert flips_of(world) == {0}


def losing_the_last_other_version(durable_dir: str, flush: bool = True, spare_left: bool = True) -> Scenario:
    """The version that generation 2 has restored is lost, and replicas disagree on the only one that memory holds.

    The first lost node leaves one copy of its shard: on the commit leader. That is lost, too, before its decision on
    the next version arrives.
    """
    world = training(nodes=3, spares=2, durable_dir=durable_dir)
    if flush:
        world.post_event(events.FlushRequested("g", "alice"))
    world.run_for(2)
    leader = carrying(world)[0]
    world.power_off(next(seat.node for seat in world.gang.roster.seats if seat.holder == leader))
    world.run_until(lambda: [(r.generation, r.running) for r in live_ranks(world)] == [(2, True)] * 3)
    if not spare_left:
        world.power_off(world.gang.roster.spares[0].node)
    world.flip_bit(carrying(world)[2])
    world.run_until(lambda: world.agent(leader).memory.disagreement is not None)
    world.power_off(leader)
    world.run_until(lambda: world.gang.newest.stepped_generation == 3 or world.gang.phase is Phase.REQUEUED)
    return world


def test_a_durable_checkpoint_comes_before_a_version_on_which_replicas_disagree() -> None:
    world = losing_the_last_other_version("/durable")
    assert world.gang.restore.restored_version is None
    assert world.facts(facts.GenerationStarted)[-1].durable_path == world.gang.checkpoint.durable_path
    assert world.gang.checkpoint.durable_version is not None
    assert flips_of(world) == {0}
    assert not view(world).replicas_disagree


def test_a_void_version_is_not_written_after_a_start_from_a_durable_checkpoint() -> None:
    """The other rank holds it, and no older version is left in memory that shows that the replicas agreed before."""
    world = training(nodes=2, spares=2, durable_dir="/durable")
    world.post_event(events.FlushRequested("g", "alice"))
    world.run_for(2)
    leader, lost = carrying(world)
    world.power_off(lost)
    world.run_until(lambda: [(r.generation, r.running) for r in live_ranks(world)] == [(2, True)] * 2)
    other = carrying(world)[1]
    world.flip_bit(other)
    world.run_until(lambda: world.agent(leader).memory.disagreement is not None)
    world.cut((leader, other))
    world.run_until(lambda: bool(world.facts(facts.ReplicasDisagreed)))
    void, saved = world.facts(facts.ReplicasDisagreed)[-1].version, world.gang.checkpoint.durable_version
    world.power_off(leader)
    world.run_until(lambda: world.gang.newest.generation == 3)
    assert void in world.agent(other).memory.versions_of(1)
    world.kill_agent(next(node for node in carrying(world) if node != other))
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert (world.gang.restore.restored_version, world.gang.checkpoint.durable_version) == (None, saved)


def test_a_group_that_never_agrees_makes_no_older_version_void() -> None:
    """Group 7 differs at step 5, and the leader that found it is lost before others know that step 4 is committed.
    Group 9 differs at each step, for a reason of the script."""
    world = training(spares=0)
    agent = world.core.observed.gang("g").agents["n1"]
    claim = events.ReplicaDisagreement(Version(2, 5), (0, 1), False, 2)
    status = replace(agent.status, disagreement=claim)
    world.post_event(events.AgentReported("g", "n1", agent.incarnation, status))
    turn = Turn(world.core.state, world.core.observed, world.core.index, world.now)
    digests = {4: ((7, 40), (7, 40), (9, 41), (9, 42)), 5: ((7, 50), (7, 51), (9, 52), (9, 53))}
    shards = {
        f"n{rank}": tuple(Shard(rank, Version(2, step), True, "", *of[rank]) for step, of in digests.items())
        for rank in range(4)
    }
    assert restore_plan.newest_left(GangTurn(turn, world.gang), lambda _: 4, shards) == (Version(2, 4), "")


def test_without_any_other_version_the_disagreeing_one_is_restored_with_a_warning() -> None:
    """A user can still start afresh, and could not get the work back."""
    world = losing_the_last_other_version("")
    start = world.facts(facts.GenerationStarted)[-1]
    assert start.version is not None
    assert (start.version.generation, world.gang.checkpoint.durable_version) == (2, None)
    assert describe(start).endswith(f"; WARNING: {restore_plan.DISAGREEMENT_WARNING}")
    assert f"step {start.version.step} is restored: {restore_plan.DISAGREEMENT_WARNING}" in shown(world)
    assert len(flips_of(world)) == 2


def test_a_second_flip_much_later_is_judged_again() -> None:
    world = training(spares=0)
    world.flip_bit(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    world.run_for(10)
    world.flip_bit(carrying(world)[1])
    world.run_until(lambda: world.gang.newest.stepped_generation == 3)
    assert [found.comparison_ends for found in world.facts(facts.ReplicasDisagreed)] == [False, False]
    assert flips_of(world) == {0}


def test_a_script_that_repeats_the_difference_is_no_longer_compared() -> None:
    """Ranks that average their parameters only now and then, for example."""
    world = training(nodes=2, spares=0)
    world.flip_bit(carrying(world)[1])
    world.run_until(lambda: [(r.generation, r.running) for r in live_ranks(world)] == [(2, True)] * 2)
    world.flip_bit(carrying(world)[1])
    world.run_until(lambda: len(world.facts(facts.ReplicasDisagreed)) == 2)
    last = world.facts(facts.ReplicasDisagreed)[-1]
    assert last.comparison_ends
    assert last.reason.endswith("this is repeated after a restart, so replicas of this run are no longer compared")
    committed = view(world).committed.step
    world.run_until(lambda: view(world).committed.step > committed + 3)
    assert world.gang.newest.generation == 2
    assert Orders(world.gang).for_node(carrying(world)[0]).replicas_differ


@pytest.mark.parametrize("observe", [True, False])
def test_claims_after_the_end_of_the_comparison_fill_no_journal(observe: bool) -> None:
    """The attack: a commit leader claims another version in each status, while no recovery asks for the budget."""
    world = training(nodes=2, spares=0, limits=Limits(observe=observe))
    leader = carrying(world)[0]
    for node in carrying(world):
        world.machines[node].has_flipped_bit = True
    for step in range(1000, 1100):
        agent = world.core.observed.gang("g").agents[leader]
        claim = events.ReplicaDisagreement(Version(world.gang.newest.generation, step), (0, 1), False, 2)
        status = replace(agent.status, disagreement=claim)
        world.post_event(events.AgentReported("g", leader, agent.incarnation, status))
        world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    assert len(world.facts(facts.ReplicasDisagreed)) <= MOST_DISAGREEMENTS
    assert world.gang.findings.disagreement is not None
    assert world.gang.findings.disagreement.comparison_ends


def test_the_last_flush_before_a_requeue_saves_it_with_the_warning() -> None:
    world = losing_the_last_other_version("/durable", flush=False, spare_left=False)
    (flush,) = world.facts(facts.FlushOrdered)
    assert flush.version.generation == 2
    assert flush.reason.endswith(f"; {restore_plan.DISAGREEMENT_WARNING}")
    assert world.gang.checkpoint.durable_version == flush.version


def test_the_last_flush_before_a_requeue_never_replaces_a_durable_checkpoint() -> None:
    world = losing_the_last_other_version("/durable", spare_left=False)
    assert [flush.version.generation for flush in world.facts(facts.FlushOrdered)] == [1]


def test_the_next_run_restores_without_a_warning_what_a_script_lets_differ() -> None:
    world = training(nodes=2, spares=0)
    for count in (1, 2):
        world.run_until(lambda: [(r.generation, r.running) for r in live_ranks(world)] == [(count, True)] * 2)  # noqa: B023
        world.flip_bit(carrying(world)[1])
        world.run_until(lambda: len(world.facts(facts.ReplicasDisagreed)) == count)  # noqa: B023
    world.run_for(3)
    world.requeue()
    world.run_until(lambda: world.gang.newest.stepped_generation == 3, 600)
    start = world.facts(facts.GenerationStarted)[-1]
    assert (start.version is not None, start.warning) == (True, "")
    assert len(flips_of(world)) == 2


def test_observe_mode_restarts_nothing() -> None:
    world = training(limits=Limits(observe=True))
    world.flip_bit(carrying(world)[2])
    world.run_until(lambda: bool(world.facts(facts.ReplicasDisagreed)))
    world.run_for(5)
    assert world.gang.newest.generation == 1
    assert world.facts(facts.ReplicasDisagreed)[0].comparison_ends


def test_an_agent_that_is_not_the_commit_leader_says_nothing_about_replicas() -> None:
    world = training()
    node = carrying(world)[1]
    agent = world.core.observed.gang("g").agents[node]
    claim = events.ReplicaDisagreement(Version(1, 3), (2,), True, 4)
    world.post_event(events.AgentReported("g", node, agent.incarnation, replace(agent.status, disagreement=claim)))
    world.run_for(1)
    assert world.facts(facts.ReplicasDisagreed) == []


@pytest.mark.parametrize("ranks", [(), (99,), (1 << 31,)])
def test_ranks_that_do_not_exist_name_no_node(ranks: tuple[int, ...]) -> None:
    world = training()
    node = carrying(world)[0]
    agent = world.core.observed.gang("g").agents[node]
    claim = events.ReplicaDisagreement(Version(1, 3), ranks, True, 4)
    world.machines[node].has_flipped_bit = True
    world.post_event(events.AgentReported("g", node, agent.incarnation, replace(agent.status, disagreement=claim)))
    world.run_for(1)
    assert [found.node for found in world.facts(facts.ReplicasDisagreed)] == []


def test_a_corrupt_copy_is_recorded_once_and_accuses_nobody() -> None:
    world = training()
    node, other = carrying(world)[:2]
    changed = events.CorruptCopy(1, Version(1, 2), False, 1, 250)
    came_so = events.CorruptCopy(3, Version(1, 2), True, 2, 0, other)
    for copies in ((changed,), (changed, came_so), (changed, came_so)):
        report_corrupt(world, node, *copies)
    assert world.facts(facts.CorruptCopyFound) == [
        facts.CorruptCopyFound("g", node, changed),
        facts.CorruptCopyFound("g", node, came_so),
    ]
    assert [describe(found) for found in world.facts(facts.CorruptCopyFound)] == [
        "corrupt data: 1 of 250 pieces of the replica of rank 1's shard of step 2 (generation 1) have changed in the "
        f"memory of node {node}: this copy is used no more",
        f"corrupt data: 2 pieces of rank 3's shard of step 2 (generation 1) came damaged to node {node} from {other}: "
        "they are not used",
    ]
    world.run_for(10)
    assert world.gang.newest.generation == 1
    assert world.slurm == []
    assert world.core.state.node(node).health is NodeHealth.FIT


def test_corrupt_copies_without_end_fill_no_journal() -> None:
    world = training()
    for step in range(1, 20):
        for node in carrying(world):
            report_corrupt(world, node, *(events.CorruptCopy(n, Version(1, step), True, 1, 2) for n in range(16)))
    assert len(world.facts(facts.CorruptCopyFound)) == MOST_CORRUPT_COPIES
    world.requeue()
    world.run_until(lambda: world.gang.slurm.restart_count == 1)
    assert world.gang.findings.corrupt_copies == (), "the next run starts anew"


def report_corrupt(world: Scenario, node: str, *copies: events.CorruptCopy) -> None:
    agent = world.core.observed.gang("g").agents[node]
    status = replace(agent.status, corrupt_copies=copies)
    world.post_event(events.AgentReported("g", node, agent.incarnation, status))


def held(*of_versions: tuple[int, ...]) -> dict[str, tuple[Shard, ...]]:
    """The shards of versions 1, 2, ...: one rank on each node, with these digests."""
    return {
        f"n{rank}": tuple(
            Shard(rank, Version(1, step), True, "", 7, of_ranks[rank]) for step, of_ranks in enumerate(of_versions, 1)
        )
        for rank in range(len(of_versions[0]))
    }


def newest(compared_after: Version | None, *of_versions: tuple[int, ...]) -> int:
    chosen = restore_plan.newest_complete_version(held(*of_versions), lambda _: len(of_versions[0]), compared_after)
    assert chosen is not None
    return chosen.step


START = Version(0, 0)


def test_a_version_on_which_replicas_disagree_is_not_restored_although_nobody_made_it_void() -> None:
    """The commit leader is lost between the snapshot and its decision."""
    assert newest(START, (1, 1, 1), (2, 2, 2)) == 2
    assert newest(START, (1, 1, 1), (2, 2, 3)) == 1
    assert newest(START, (1, 1), (2, 2), (3, 4), (5, 6)) == 2


@pytest.mark.parametrize(("of_ranks", "count", "step"), [((2, 2, 3), 2, 2), ((2, 3, 2), 2, 1), ((2, 3), 1, 1)])
def test_fewer_ranks_do_without_those_in_the_minority(of_ranks: tuple[int, ...], count: int, step: int) -> None:
    shards = held(tuple(1 for _ in of_ranks), of_ranks)
    assert restore_plan.newest_complete_version(shards, lambda _: count, START) == Version(1, step)


def test_replicas_that_have_never_agreed_are_restored() -> None:
    assert newest(START, (1, 2, 3), (4, 5, 6)) == 2
    assert newest(START, (1, 2)) == 1


def test_a_committed_version_has_been_compared_by_the_leader() -> None:
    assert newest(Version(1, 2), (1, 1, 1), (2, 2, 3)) == 2


def test_nothing_is_compared_where_the_comparison_has_ended() -> None:
    assert newest(None, (1, 1, 1), (2, 2, 3)) == 2


def test_the_next_leader_knows_which_replicas_have_agreed() -> None:
    assert restore_plan.agreed_groups(held((1, 1, 1)), Version(1, 1)) == (7,)
    assert restore_plan.agreed_groups(held((1, 1, 2)), Version(1, 1)) == ()
    assert restore_plan.agreed_groups(held((1,)), Version(1, 1)) == ()
    assert restore_plan.agreed_groups(held((1, 1)), None) == ()
