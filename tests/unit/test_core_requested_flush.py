"""A durable checkpoint that a user requests: when it is written, and when it is not."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenario import Scenario


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
    assert world.gang.restore.restored_version is not None
    requests(world)
    assert ordered(world) == 0
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.run_until(lambda: ordered(world) == 1, 1.0)


def test_a_checkpoint_requested_before_there_is_one_is_not_written() -> None:
    world = starting(durable_dir="/durable")
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    requests(world)
    world.run_for(10.0)
    assert world.gang.newest.stepped_generation == 1
    assert ordered(world) == 0


@pytest.mark.parametrize(("durable_dir", "flushes"), [("", 0), ("/durable", 1)])
def test_a_checkpoint_is_written_only_for_a_job_with_a_durable_folder(durable_dir: str, flushes: int) -> None:
    world = training(durable_dir)
    requests(world)
    world.run_for(10.0)
    assert ordered(world) == flushes


def of_short_steps() -> Scenario:
    world = Scenario(4, 0, flush_s=0.1, durable_dir="/durable", step_s=0.05, copy_s=0.012)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 20)
    return world


def report_different_versions(world: Scenario) -> events.Version:
    """Agents report at different moments, and have committed two more versions between two reports. Returns what the
    commit leader says."""
    observed = world.core.observed.gang("g")
    newest = observed.status("n0").committed
    assert newest is not None
    for number, (node, agent) in enumerate(sorted(observed.agents.items())):
        version = events.Version(newest.generation, newest.step + 2 * number)
        shards = tuple(replace(shard, version=version) for shard in agent.status.shards)
        status = replace(agent.status, shards=shards, committed=version)
        world.post_event(events.AgentReported("g", node, agent.incarnation, status))
    return newest


def test_a_checkpoint_is_ordered_at_once_however_short_the_steps_are() -> None:
    """Agents report four times a second. With steps of 50 ms, no two reports are of one version."""
    world = of_short_steps()
    newest = report_different_versions(world)
    requests(world)
    (order,) = world.facts(facts.FlushOrdered)
    assert order.version == newest
    assert [(source.rank, source.node) for source in order.sources] == [
        (seat.group_rank, seat.node) for seat in sorted(world.gang.roster.seats, key=lambda seat: seat.group_rank)
    ]
    world.run_until(lambda: bool(world.facts(facts.FlushEnded)))
    (ended,) = world.facts(facts.FlushEnded)
    assert not ended.error
    assert ended.version is not None
    assert ended.version >= newest


def test_what_the_leader_has_committed_is_not_flushed_while_a_node_with_ranks_is_away() -> None:
    world = of_short_steps()
    report_different_versions(world)
    world.post_event(events.AgentDisconnected("g", "n1", world.core.observed.gang("g").agents["n1"].incarnation))
    requests(world)
    assert ordered(world) == 0
