"""Durable checkpoints that the job's policy asks for: durable_every in steps, in minutes, or by costs and failures."""

from dataclasses import replace
from itertools import pairwise

import pytest

from muster.daemon.coordinator.core.recovery import flushing
from muster.daemon.coordinator.core.state import events, facts, step_pace
from muster.daemon.coordinator.core.state.step_pace import FlushCosts
from muster.fabric.cost import reliability
from muster.simulator.scenario import Scenario


def training(flush_s: float = 0.5, **spec: object) -> Scenario:
    """A gang of two nodes that trains, 0.2 s a step."""
    world = Scenario(2, 0, flush_s=flush_s, durable_dir="/durable", **spec)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 1)
    return world


def ordered(world: Scenario) -> list[tuple[float, facts.FlushOrdered]]:
    return [(at, fact) for at, fact in world.journal if isinstance(fact, facts.FlushOrdered)]


def test_a_job_without_a_policy_writes_none_unasked() -> None:
    world = training()
    world.run_for(300.0)
    assert ordered(world) == []


def test_every_so_many_steps_one_is_written_and_training_goes_on() -> None:
    world = training(durable_every_steps=50)
    world.run_for(45.0)
    steps = [fact.version.step for _, fact in ordered(world)]
    assert len(steps) == 4
    assert all(50 <= after - before < 55 for before, after in zip([0, *steps], steps, strict=False))
    assert {fact.reason for _, fact in ordered(world)} == {"durable_every = 50 steps"}
    assert world.gang.newest.generation == 1
    assert world.gang.checkpoint.durable_version is not None
    assert world.gang.checkpoint.durable_version.step >= steps[-2]


def test_every_so_many_minutes_one_is_written() -> None:
    world = training(durable_every_s=60.0)
    world.run_for(190.0)
    times = [at for at, _ in ordered(world)]
    assert len(times) == 3
    assert all(60.0 <= after - before < 62.0 for before, after in pairwise(times))
    assert ordered(world)[0][1].reason == "durable_every = 1 minute"


def test_while_storage_is_full_training_goes_on_and_the_policy_asks_again_later() -> None:
    world = training(durable_every_steps=10)
    world.world.durable_storage.fails_until = world.now + 150.0
    before = world.core.observed.gang("g").step_number
    world.run_for(150.0)
    failed = [fact for fact in world.facts(facts.FlushEnded) if fact.error]
    assert len(failed) == 3, "not more often than RETRY_S allows"
    assert "no space left on device" in failed[0].error
    assert world.gang.newest.generation == 1
    assert world.core.observed.gang("g").step_number - before > 700
    world.run_for(flushing.RETRY_S)
    assert world.facts(facts.FlushEnded)[-1].path
    assert world.gang.checkpoint.durable_version is not None


def test_storage_that_hangs_is_an_event_and_training_goes_on() -> None:
    world = training(durable_every_s=60.0)
    world.world.durable_storage.hangs_until = world.now + 10_000.0
    before = world.core.observed.gang("g").step_number
    world.run_for(60.0 + step_pace.FLUSH_STALL_S + 5.0)
    [ended] = world.facts(facts.FlushEnded)
    assert ended.error == "not written within 120 s"
    assert world.gang.newest.generation == 1
    assert world.core.observed.gang("g").step_number - before > 900


def test_a_version_is_not_written_twice() -> None:
    world = training(durable_every_s=6.0, step_s=50.0)
    world.run_for(400.0)
    versions = [fact.version for _, fact in ordered(world)]
    assert len(versions) == len(set(versions)) >= 5


def test_by_costs_and_failures_the_first_one_comes_after_ten_minutes_and_then_daly_decides() -> None:
    world = training(flush_s=6.0, step_s=2.0, durable_auto=True, node_mtbf_s=7200.0)
    world.run_for(3000.0)
    times = [at for at, _ in ordered(world)]
    assert times[0] - world.gang.account.registered_at == pytest.approx(flushing.UNMEASURED_INTERVAL_S, abs=1.0)
    assert world.gang.newest.mtbf_s == 3600.0, "two nodes"
    costs = world.core.observed.gang("g").flush_costs
    assert costs.took_s == pytest.approx(6.0, abs=0.5)
    cost_s = max(costs.stall_s, flushing.LEAST_COST * costs.took_s)
    expected = reliability.daly_interval(3600.0 / flushing.MEMORY_LOST_SHARE, cost_s)
    assert flushing.durable_interval_s(world.gang, world.core.observed.gang("g")) == pytest.approx(expected)
    assert times[-1] - times[-2] == pytest.approx(expected, rel=0.1)


def test_what_a_flush_costs_is_its_time_less_the_steps_meanwhile() -> None:
    costs = FlushCosts()
    costs.begin(1, (1, 100), 50.0)
    costs.end(1, (1, 108), 1.0, 60.0)
    assert (costs.took_s, costs.stall_s) == (10.0, 2.0)
    costs.begin(2, (1, 200), 150.0)
    costs.end(2, (1, 212), 1.0, 160.0)
    assert costs.stall_s == 0.0, "the mean of 2 s and -2 s: a step is counted whole or not at all"
    costs.begin(3, (1, 300), 200.0)
    costs.end(3, (2, 301), 1.0, 230.0)
    assert (costs.took_s, costs.stall_s) == (30.0, 0.0), "a restart meanwhile is no cost of the flush"
    costs.end(4, (2, 310), 1.0, 300.0)
    assert costs.took_s == 30.0, "a flush whose beginning nobody has seen"


def test_a_restarted_coordinator_keeps_to_the_policy() -> None:
    world = training(durable_every_s=60.0)
    world.run_for(70.0)
    assert len(ordered(world)) == 1
    world.restart_coordinator()
    world.run_for(30.0)
    assert len(ordered(world)) == 1
    world.run_for(40.0)
    assert len(ordered(world)) == 2


def test_the_path_is_that_of_the_version_which_was_written() -> None:
    """With short steps the agents have committed a newer version by the time the order reaches them."""
    world = training(durable_every_steps=200, step_s=0.01, copy_s=0.001)
    world.run_for(20.0)
    asked = {fact.serial: fact.version for _, fact in ordered(world)}
    done = [fact for fact in world.facts(facts.FlushEnded) if fact.path]
    assert any(fact.version > asked[fact.serial] for fact in done if fact.version is not None)
    for fact in done:
        assert fact.version == world.world.durable_storage.version_of("g", fact.path)
        assert fact.version is not None
        assert fact.path == f"/durable/step_{fact.version.step:08d}_g1_g"
    assert world.gang.checkpoint.durable_version == done[-1].version
    assert world.replayed_state().gangs["g"].checkpoint.durable_version == done[-1].version


def report_written(world: Scenario, node: str, written: int, total: int) -> None:
    """The agent reports what it has written of the newest flush."""
    agent = world.core.observed.gang("g").agents[node]
    assert world.gang.checkpoint.flush is not None
    progress = events.FlushProgress(world.gang.checkpoint.flush.serial, written, total)
    world.post_event(events.AgentReported("g", node, agent.incarnation, replace(agent.status, flush_progress=progress)))


def flushing_to_slow_storage() -> Scenario:
    """Two nodes write, and the simulated storage completes nothing."""
    world = training(durable_every_s=60.0, step_s=5.0)
    world.world.durable_storage.hangs_until = world.now + 1e6
    world.run_until(lambda: bool(ordered(world)), 100.0)
    return world


GIB = 1 << 30


def test_a_large_state_on_slow_storage_is_not_cut_and_storage_that_stops_is_told_with_its_rate() -> None:
    world = flushing_to_slow_storage()
    asked_at = world.now
    for minute in range(30):  # 5 MB/s: 10 GiB take 36 minutes
        for node in ("n0", "n1"):
            report_written(world, node, minute * 300_000_000, 10 * GIB)
        world.run_for(60.0)
        assert world.facts(facts.FlushEnded) == []
    report_written(world, "n1", 31 * 300_000_000, 10 * GIB)
    world.run_for(90.0)
    (ended,) = world.facts(facts.FlushEnded)
    assert "n0: storage is dead or too slow: of 10.74 GB, 8.70 GB were written" in ended.error
    assert "less than 240 MB in the last 120 s" in ended.error
    took = next(at for at, fact in world.journal if isinstance(fact, facts.FlushEnded)) - asked_at
    assert took == pytest.approx(29 * 60.0 + step_pace.FLUSH_STALL_S, abs=3.0)
    assert world.gang.newest.generation == 1


def test_storage_below_the_least_rate_is_given_up_though_bytes_still_come() -> None:
    world = flushing_to_slow_storage()
    for seconds in range(0, 110, 10):
        for node in ("n0", "n1"):
            report_written(world, node, seconds * 1_000_000, 10 * GIB)
        world.run_for(10.0)
    assert world.facts(facts.FlushEnded) == []
    report_written(world, "n0", 110_000_000, 10 * GIB)
    world.run_for(15.0)
    (ended,) = world.facts(facts.FlushEnded)
    assert "storage is dead or too slow" in ended.error


def test_a_node_that_has_written_all_may_wait_for_another_one() -> None:
    world = flushing_to_slow_storage()
    report_written(world, "n0", GIB, GIB)
    for minute in range(10):
        report_written(world, "n1", minute * 300_000_000, 4 * GIB)
        world.run_for(60.0)
    assert world.facts(facts.FlushEnded) == []
    report_written(world, "n1", 4 * GIB, 4 * GIB)
    world.run_for(step_pace.FLUSH_STALL_S - 5.0)
    assert world.facts(facts.FlushEnded) == []
    world.run_for(10.0)
    assert len(world.facts(facts.FlushEnded)) == 1, "the leader completes nothing"


def test_a_restarted_coordinator_gives_storage_the_whole_time_again() -> None:
    world = flushing_to_slow_storage()
    for node in ("n0", "n1"):
        report_written(world, node, 0, GIB)
    world.run_for(100.0)
    world.restart_coordinator()
    world.run_for(100.0)
    assert world.facts(facts.FlushEnded) == []
    world.run_for(30.0)
    assert len(world.facts(facts.FlushEnded)) == 1
