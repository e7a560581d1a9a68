"""A straggler in a simulated gang: what the core records, what users see, and what follows."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import BlockTimes
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.output import tables
from muster.simulator.scenarios.scenario import Scenario
from muster.v1 import api_pb2


def training(nodes: int = 8, spares: int = 1, **given: object) -> Scenario:
    world = Scenario(nodes, spares, **given)  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.RUNNING and world.core.observed.gang("g").step_number >= 3)
    return world


def report(world: Scenario, first_block: int, blocks: int, slow_rank: int | None, slower_by: float = 0.3) -> None:
    """All agents report so many further blocks of steps of 50 ms, in which one rank is slow."""
    for number in range(first_block, first_block + blocks):
        for seat in world.gang.seats:
            agent = world.core.observed.gang("g").agents[seat.node]
            ranks = tuple(
                replace(rank, block_times=_times(number, slow_rank, rank.rank, slower_by))
                for rank in agent.status.ranks
            )
            status = replace(agent.status, ranks=ranks)
            world.post_event(events.AgentReported("g", seat.node, agent.incarnation, status))
        world.run_for(0.2)  # a block of four steps


def _times(number: int, slow_rank: int | None, rank: int, slower_by: float) -> BlockTimes:
    if slow_rank is None:
        return BlockTimes(number, (50_000,), (1_000,))
    excess_us = int(50_000 * slower_by)
    return BlockTimes(number, (50_000 + excess_us * (rank == slow_rank),), (1_000 + excess_us * (rank != slow_rank),))


def view(world: Scenario) -> api_pb2.GangView:
    return gang_view(world.core.state, world.core.observed, world.gang, world.now)


def node_of(world: Scenario, rank: int) -> str:
    return next(seat.node for seat in world.gang.seats if seat.group_rank == rank)


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
    assert world.gang.generation == 1
    assert world.slurm == []


def test_equal_ranks_record_nothing() -> None:
    world = training()
    report(world, 0, 40, slow_rank=None)
    assert world.facts(facts.StragglerDetected) == []


def test_status_shows_it_while_it_is_slow() -> None:
    world = training()
    report(world, 0, 5, slow_rank=5)
    slow = {rank.rank: round(rank.slower_by, 2) for rank in view(world).ranks if rank.slower_by}
    assert slow == {5: 0.3}
    assert "computes 30% longer than the median rank" in "".join(_words(view(world)))
    report(world, 5, 15, slow_rank=None)
    assert not any(rank.slower_by for rank in view(world).ranks)


def _words(shown: api_pb2.GangView) -> list[str]:
    summary = tables._summary_table(shown)
    return [str(cell) for column in summary.columns for cell in column.cells]


def test_few_stragglers_of_a_generation_are_recorded() -> None:
    """The attack: an owner's ranks claim to be slow in turn, and each claim is a record of the journal."""
    world = training(nodes=12)
    for rank in range(12):
        report(world, 40 * rank, 20, slow_rank=rank)
        report(world, 40 * rank + 20, 20, slow_rank=None)
    assert len(world.facts(facts.StragglerDetected)) == 8


@pytest.mark.parametrize("generation", [0, 2, 1 << 60])
def test_blocks_of_another_generation_count_for_nothing(generation: int) -> None:
    world = training()
    for number in range(10):
        for seat in world.gang.seats:
            agent = world.core.observed.gang("g").agents[seat.node]
            ranks = tuple(
                replace(rank, generation=generation, block_times=_times(number, 5, rank.rank, 0.3))
                for rank in agent.status.ranks
            )
            status = replace(agent.status, ranks=(*agent.status.ranks, *ranks))
            world.post_event(events.AgentReported("g", seat.node, agent.incarnation, status))
    assert world.facts(facts.StragglerDetected) == []
