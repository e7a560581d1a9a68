"""A straggler in a simulated gang: what the core records, what users see, and what follows."""

from dataclasses import replace
from functools import partial

import pytest
from tests.unit import training_worlds

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import BlockTimes
from muster.daemon.coordinator.core.state.limits import Limits, StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.output import tables
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS
from muster.v1 import api_pb2

training = partial(training_worlds.training, nodes=8, spares=1)


def report(
    world: Scenario, first_block: int, blocks: int, slow_rank: int | None, slower_by: float = 0.3, on_node: int = 1
) -> None:
    """All agents report so many further blocks of steps of 50 ms, in which the rank and those after it are slow, up to
    `on_node` ranks."""
    if slow_rank is not None:
        world.machines[node_of(world, slow_rank)].has_slow_rank = True
        world.world.step_times.script("g", slow_rank)
    for number in range(first_block, first_block + blocks):
        for seat in world.gang.roster.seats:
            agent = world.core.observed.gang("g").agents[seat.node]
            ranks = tuple(
                replace(rank, block_times=_times(number, slow_rank, rank.rank, slower_by, on_node))
                for rank in agent.status.ranks
            )
            status = replace(agent.status, ranks=ranks)
            world.post_event(events.AgentReported("g", seat.node, agent.incarnation, status))
        world.run_for(0.2)  # a block of four steps


def _times(number: int, slow_rank: int | None, rank: int, slower_by: float, on_node: int = 1) -> BlockTimes:
    if slow_rank is None:
        return BlockTimes(number, (50_000,), (1_000,))
    excess_us = int(50_000 * slower_by)
    slow = slow_rank <= rank < slow_rank + on_node
    return BlockTimes(number, (50_000 + excess_us * slow,), (1_000 + excess_us * (not slow),))


def view(world: Scenario) -> api_pb2.GangView:
    return gang_view(world.core.state, world.core.observed, world.gang, world.now)


def node_of(world: Scenario, rank: int) -> str:
    return next(
        seat.node for seat in world.gang.roster.seats if seat.group_rank == rank // world.gang.spec.ranks_per_node
    )


def test_it_is_recorded_once_with_rank_node_and_amount_and_no_node_is_judged() -> None:
    world = training()
    report(world, 0, 40, slow_rank=5)
    (found,) = world.facts(facts.StragglerDetected)
    node = node_of(world, 5)
    assert (found.generation, found.rank, found.node, found.response) == (1, 5, node, None)
    assert found.reason == (
        f"rank 5 on {node} computes 30% longer than the median rank in each step (65.0 ms instead of 50.0 ms), "
        "and the others wait for it"
    )
    assert all(node.health is NodeHealth.FIT for node in world.core.state.nodes.values())
    world.run_for(30)
    assert world.gang.newest.generation == 1
    assert world.slurm == []


def test_ranks_of_one_node_that_are_slow_together_are_one_finding_that_names_the_node() -> None:
    world = training(nodes=3, ranks_per_node=2, limits=rule("record"))
    report(world, 0, 60, slow_rank=2, on_node=2)
    first, lasts = world.facts(facts.StragglerDetected)
    node = node_of(world, 2)
    assert {(found.rank, found.node) for found in (first, lasts)} == {(2, node)}
    words = "2 of its 2 ranks (2, 3) compute up to 30% longer than the median rank in each step"
    assert first.reason == f"{node} is slow: {words} (65.0 ms instead of 50.0 ms), and the others wait for it"
    assert lasts.response is Response.RECORD
    (line,) = [line for line in _words(view(world)) if "longer than the median rank" in line]
    pace = "compute up to 30% longer than the median rank in each step"
    assert line == f"2 of 2 ranks on {node} (2, 3) {pace}, and the others wait for them"


def test_equal_ranks_record_nothing() -> None:
    world = training()
    report(world, 0, 40, slow_rank=None)
    assert world.facts(facts.StragglerDetected) == []


def test_status_shows_it_while_it_is_slow() -> None:
    world = training()
    report(world, 0, 27, slow_rank=5)
    slow = {rank.rank: round(rank.slower_by, 2) for rank in view(world).ranks if rank.slower_by}
    assert slow == {5: 0.3}
    assert "computes 30% longer than the median rank" in "".join(_words(view(world)))
    report(world, 27, 15, slow_rank=None)
    assert not any(rank.slower_by for rank in view(world).ranks)


def _words(shown: api_pb2.GangView) -> list[str]:
    return [words for _, words in tables.conditions(shown)]


def test_few_stragglers_of_a_generation_are_recorded() -> None:
    """The attack: an owner's ranks claim to be slow in turn, and each claim is a record of the journal."""
    world = training(nodes=9, step_s=2.0)
    for rank in range(9):
        report(world, 160 * rank, 25, slow_rank=rank)
        report(world, 160 * rank + 25, 135, slow_rank=None)  # until nobody is a suspect
    assert len(world.facts(facts.StragglerDetected)) == 8


@pytest.mark.parametrize("generation", [0, 2, 1 << 60])
def test_blocks_of_another_generation_count_for_nothing(generation: int) -> None:
    world = training()
    for number in range(10):
        for seat in world.gang.roster.seats:
            agent = world.core.observed.gang("g").agents[seat.node]
            ranks = tuple(
                replace(rank, generation=generation, block_times=_times(number, 5, rank.rank, 0.3))
                for rank in agent.status.ranks
            )
            status = replace(agent.status, ranks=(*agent.status.ranks, *ranks))
            world.post_event(events.AgentReported("g", seat.node, agent.incarnation, status))
    assert world.facts(facts.StragglerDetected) == []


def rule(response: str, window_s: float = 4.0) -> Limits:
    return replace(NO_LIMITS, straggler=StragglerRule(0.9, window_s, Response(response)))


def lasting(world: Scenario) -> list[facts.StragglerDetected]:
    return [fact for fact in world.facts(facts.StragglerDetected) if fact.response is not None]


def verdicts(world: Scenario) -> dict[str, str]:
    return {node.node: node.verdict for node in view(world).nodes}


def test_one_that_lasts_is_recorded_and_the_node_is_degraded_in_this_job_alone() -> None:
    world = training(limits=rule("record"))
    report(world, 0, 35, slow_rank=5)
    assert lasting(world) == []
    assert set(verdicts(world).values()) == {"FIT"}
    report(world, 35, 25, slow_rank=5)
    (found,) = lasting(world)
    node = node_of(world, 5)
    assert (found.rank, found.node, found.response) == (5, node, Response.RECORD)
    assert found.reason.endswith("for 90% of 4 s")
    assert [name for name, verdict in verdicts(world).items() if verdict == "DEGRADED"] == [node]
    assert world.core.state.node(node).health is NodeHealth.FIT
    world.run_for(10)
    assert (world.gang.newest.generation, world.slurm) == (1, [])


def test_a_policy_without_a_response_only_names_it() -> None:
    world = training(limits=replace(NO_LIMITS, straggler=None))
    report(world, 0, 60, slow_rank=5)
    assert len(world.facts(facts.StragglerDetected)) == 1


def test_flush_writes_the_state_and_moves_nobody() -> None:
    world = training(limits=rule("flush"), durable_dir="/durable")
    report(world, 0, 60, slow_rank=5)
    world.run_for(10)
    assert (world.gang.newest.generation, len(world.facts(facts.FlushOrdered))) == (1, 1)


def test_swap_leaves_the_node_loses_no_step_and_drains_nothing() -> None:
    world = training(limits=rule("swap"))
    node = node_of(world, 5)
    report(world, 0, 46, slow_rank=5)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    recovery = world.gang.recovery.recoveries[-1]
    assert (recovery.action, recovery.nodes_out) == ("planned swap", [node])
    assert recovery.cause.startswith(f"rank 5 on {node} computes 30% longer")
    assert recovery.step_restored == recovery.step_before
    world.run_for(5)
    assert [(call.verb, call.node) for call in world.slurm] == [("let_go", node)]
    assert world.core.state.node(node).health is NodeHealth.FIT
    assert set(verdicts(world).values()) == {"FIT"}


def test_a_rank_that_is_slow_on_the_next_node_too_stays_there() -> None:
    """The job is the cause: uneven data goes with the rank. The spares are not used up."""
    world = training(spares=3, limits=rule("swap"))
    first = node_of(world, 5)
    report(world, 0, 46, slow_rank=5)
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    second = node_of(world, 5)
    assert second != first
    report(world, 0, 90, slow_rank=5)
    world.run_for(10)
    assert world.gang.newest.generation == 2
    assert lasting(world)[-1].node == second
    assert lasting(world)[-1].reason.endswith(f"it was slow on {first}, too, so the cause is in the job")
    assert world.gang.roster.spares


def test_without_a_spare_the_ranks_stay() -> None:
    world = training(spares=0, limits=rule("swap"))
    report(world, 0, 60, slow_rank=5)
    world.run_for(10)
    assert (world.gang.newest.generation, len(lasting(world)), world.slurm) == (1, 1, [])


def test_a_restarted_coordinator_records_it_no_second_time() -> None:
    world = training(limits=rule("record", window_s=1000.0))
    report(world, 0, 30, slow_rank=5)
    world.restart_coordinator()
    world.run_for(5)
    report(world, 30, 40, slow_rank=5)
    assert len(world.facts(facts.StragglerDetected)) == 1
    assert any(rank.slower_by for rank in view(world).ranks)
