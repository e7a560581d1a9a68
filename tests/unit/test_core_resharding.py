"""Another number of ranks than wrote a version: which shards it needs, and what it starts from if one is lost."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenario import Scenario


def training(nodes: int = 4, **given: object) -> Scenario:
    """An elastic gang without spares, some steps after its start."""
    world = Scenario(nodes, 0, min_nodes=1, **given)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    return world


def goes_on(world: Scenario, *lost: str) -> facts.GenerationStarted:
    """How the gang goes on when these nodes are lost at the same time."""
    generation = world.gang.newest.generation
    for node in lost:
        world.crash(node)
    world.run_until(lambda: world.gang.newest.stepped_generation > generation)
    return world.facts(facts.GenerationStarted)[-1]


def test_fewer_ranks_of_a_sharded_job_read_the_shards_of_all() -> None:
    world = training(sharded=True)
    start = goes_on(world, "n2")
    assert start.version is not None
    assert start.resharded
    assert [source.rank for source in start.sources] == [0, 1, 2, 3]
    assert world.facts(facts.FirstStep)[-1].step == start.version.step + 1


def test_fewer_replicas_read_their_own() -> None:
    start = goes_on(training(), "n2")
    assert start.version is not None
    assert not start.resharded
    assert [source.rank for source in start.sources] == [0, 1, 2]


def test_as_many_ranks_of_a_sharded_job_read_their_own() -> None:
    world = training(sharded=True)
    generation = world.gang.newest.generation
    world.kill_rank("n1")
    world.run_until(lambda: world.gang.newest.stepped_generation > generation)
    start = world.facts(facts.GenerationStarted)[-1]
    assert (start.resharded, len(start.sources)) == (False, 4)


@pytest.mark.parametrize(("sharded", "from_memory"), [(True, False), (False, True)])
def test_a_shard_that_is_lost_with_its_replica_matters_where_it_is_part_of_the_state(
    sharded: bool, from_memory: bool
) -> None:
    """The last rank's shard, which replicas do without."""
    world = training(sharded=sharded, durable_dir="/durable")
    world.post_event(events.FlushRequested("g", "uid 1000"))
    world.run_until(lambda: world.gang.checkpoint.durable_version is not None)
    durable = world.gang.checkpoint.durable_version
    world.run_until(lambda: world.core.observed.gang("g").step_number > durable.step + 5)
    last = world.gang.roster.seats[-1]
    start = goes_on(world, last.node, last.holder)
    assert (start.version is not None) == from_memory
    assert bool(start.durable_path) == (not from_memory)


def test_a_second_shrink_before_the_next_commit_reads_the_same_shards() -> None:
    world = training(sharded=True, copy_s=5.0)
    world.run_for(10.0)  # something is committed; after the shrink, nothing is so soon
    buddies = {seat.node: seat.holder for seat in world.gang.roster.seats}
    first = goes_on(world, "n2")
    next_lost = next(n for n, buddy in buddies.items() if n not in ("n2", buddies["n2"]) and buddy != "n2")
    second = goes_on(world, next_lost)
    assert (second.version, second.resharded, len(second.seats)) == (first.version, True, 2)
    assert [source.rank for source in second.sources] == [0, 1, 2, 3]


def test_the_version_of_all_old_ranks_can_be_written_before_the_next_commit() -> None:
    world = training(sharded=True, durable_dir="/durable")
    start = goes_on(world, "n2")
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    assert start.version is not None
    assert world.gang.checkpoint.durable_version is not None
    assert world.gang.checkpoint.durable_version >= start.version


def test_a_full_size_after_a_requeue_reads_the_shards_of_fewer() -> None:
    world = training(sharded=True)
    goes_on(world, "n2")
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_until(lambda: not any(agent.alive for agent in world.world.agents.values()))
    world.repair("n2")
    world.run_until(lambda: world.gang.newest.stepped_generation == 3, 900)
    start = world.facts(facts.GenerationStarted)[-1]
    assert isinstance(start.version, Version)
    assert (len(start.seats), start.resharded) == (4, True)
    assert [source.rank for source in start.sources] == [0, 1, 2]
