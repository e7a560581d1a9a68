"""What a requeued gang starts from: memory where all of it is kept, and nothing older than the durable checkpoint."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.recovery.restore_plan import memory_is_obsolete
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.node.kept_memory.retention import RETENTION_S
from muster.simulator.scenario import Scenario
from muster.simulator.world.agent import Agent


def requeued(**given: object) -> Scenario:
    """A gang that waits in Slurm's queue after some steps."""
    world = Scenario(4, 1, **given)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 5)
    world.sigterm()
    world.run_until(lambda: world.gang.phase is Phase.REQUEUED)
    world.run_until(lambda: not any(agent.alive for agent in world.world.agents.values()))
    return world


def starts_again(world: Scenario) -> facts.GenerationStarted:
    world.run_until(lambda: world.gang.newest.stepped_generation == 2, 900)
    return world.facts(facts.GenerationStarted)[-1]


@pytest.mark.parametrize("durable_dir", ["", "/durable"])
def test_a_requeued_gang_continues_from_memory_with_the_step_after_its_last(durable_dir: str) -> None:
    world = requeued(durable_dir=durable_dir)
    start = starts_again(world)
    assert start.version is not None
    assert start.version.step >= 5
    assert (start.durable_path, len(start.sources)) == ("", 4)
    assert world.facts(facts.FirstStep)[-1].step == start.version.step + 1


@pytest.mark.parametrize(("durable_dir", "folder"), [("", False), ("/durable", True)])
def test_memory_that_another_job_displaced_on_one_node_is_missing(durable_dir: str, folder: bool) -> None:
    world = requeued(durable_dir=durable_dir)
    world.start_other_job(world.gang.roster.seats[1].node)
    start = starts_again(world)
    assert start.version is None
    assert bool(start.durable_path) == folder


def test_memory_that_nobody_needs_does_not_matter() -> None:
    world = requeued()
    world.start_other_job(world.gang.roster.spares[0].node)
    assert starts_again(world).version is not None


def test_damaged_memory_is_not_used() -> None:
    world = requeued(durable_dir="/durable")
    world.world.kept_memory.damage_rate = 1.0
    start = starts_again(world)
    assert (start.version, start.durable_path) == (None, world.gang.checkpoint.durable_path)


def test_no_start_is_older_than_the_durable_checkpoint() -> None:
    world = requeued(durable_dir="/durable")
    durable = world.gang.checkpoint.durable_version
    assert durable is not None
    older = Version(durable.generation, durable.step - 1)
    for agent in world.world.agents.values():
        other = Agent(world.world, agent.machine, agent.identity)
        for rank in agent.ranks:
            other.memory.add(rank, True, older)
        world.world.kept_memory.keep(other)
    start = starts_again(world)
    assert (start.version, start.durable_path) == (None, world.gang.checkpoint.durable_path)


def test_a_job_that_waits_for_longer_than_memory_is_kept_starts_from_durable_storage() -> None:
    world = requeued(durable_dir="/durable")
    for node in world.machines:
        world.world.kept_memory.expire(node, world.now + RETENTION_S)
    assert starts_again(world).version is None


def test_memory_is_wanted_until_the_gang_has_started_again() -> None:
    """The start used the memory, or did without it: what nodes still keep is of no use."""
    world = requeued()
    left = world.gang.newest.generation
    assert not memory_is_obsolete(world.gang, left)
    assert not memory_is_obsolete(None, left)
    starts_again(world)
    assert memory_is_obsolete(world.gang, left)
    assert not memory_is_obsolete(world.gang, world.gang.newest.generation)
    world.finish()
    world.run_until(lambda: world.gang.final)
    assert memory_is_obsolete(world.gang, world.gang.newest.generation)
