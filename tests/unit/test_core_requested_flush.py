"""A durable checkpoint that a user requests: when it is written, and when it is not."""

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenarios.scenario import Scenario


def starting(**spec: object) -> Scenario:
    """A gang whose first generation starts. A checkpoint takes 2 s to write."""
    world = Scenario(2, 0, flush_s=2.0, **spec)  # type: ignore[arg-type]
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    return world


def training(durable_dir: str = "/durable") -> Scenario:
    world = starting(durable_dir=durable_dir)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 3)
    return world


def requests(world: Scenario) -> None:
    world.post_event(events.FlushRequested("g", "uid 1000"))


def ordered(world: Scenario) -> int:
    return len(world.facts(facts.FlushOrdered))


def test_one_requested_checkpoint_is_written_at_a_time() -> None:
    world = training()
    requests(world)
    world.run_for(0.5)
    requests(world)
    world.run_for(0.5)
    assert ordered(world) == 1
    world.run_until(lambda: ordered(world) == 2)
    assert [bool(fact.path) for fact in world.facts(facts.FlushEnded)] == [True]
    world.run_for(10.0)
    assert ordered(world) == 2


def test_a_checkpoint_requested_while_ranks_start_is_written_once_they_run() -> None:
    world = training()
    world.kill_rank("n1")
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    assert world.gang.restored_version is not None
    requests(world)
    assert ordered(world) == 0
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.run_until(lambda: ordered(world) == 1, 1.0)


def test_a_checkpoint_requested_before_there_is_one_is_not_written() -> None:
    world = starting(durable_dir="/durable")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    requests(world)
    world.run_for(10.0)
    assert world.gang.stepped_generation == 1
    assert ordered(world) == 0


@pytest.mark.parametrize(("durable_dir", "flushes"), [("", 0), ("/durable", 1)])
def test_a_checkpoint_is_written_only_for_a_job_with_a_durable_folder(durable_dir: str, flushes: int) -> None:
    world = training(durable_dir)
    requests(world)
    world.run_for(10.0)
    assert ordered(world) == flushes
