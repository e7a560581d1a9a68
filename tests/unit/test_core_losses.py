"""What follows in a simulated gang when its loss is not finite, has a spike, or falls no more."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse, LossRule
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.recovery.losses.loss_findings import FINDINGS_PER_GENERATION
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import NodeNumber, NodeTraining, NotFinite, Version
from muster.daemon.coordinator.core.state.fact_text import describe, loss_words
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.simulator.scenario import Scenario

RULE = LossRule(window=16)


def training(spike: str = "", rule: LossRule = RULE, **given: object) -> Scenario:
    """A gang whose loss is high in steps 30 to 39."""
    choice = LossChoice(spike=LossResponse(spike)) if spike else LossChoice()
    world = Scenario(3, 1, limits=Limits(loss=rule), loss=choice, **given)  # type: ignore[arg-type]
    world.spoil_batches("30", "39")
    return world


def shown(world: Scenario) -> str:
    core = world.core
    return "\n".join(gang_details(gang_view(core.state, core.observed, world.gang, world.now), Screen(120)))


def report(world: Scenario, step: int, value: float) -> None:
    """The node of rank 0 reports this loss."""
    node = min(world.gang.roster.seats, key=lambda seat: seat.group_rank).node
    agent = world.core.observed.gang("g").agents[node]
    number = NodeNumber("loss", step, 1, value, value, value, 0, 0)
    status = replace(agent.status, training=NodeTraining(world.gang.newest.generation, (number,)))
    world.post_event(events.AgentReported("g", node, agent.incarnation, status))
    world.run_for(0.01)


def report_not_finite(world: Scenario) -> None:
    """Every rank reports that its loss is no number."""
    for seat in world.gang.roster.seats:
        agent = world.core.observed.gang("g").agents[seat.node]
        ranks = tuple(replace(r, not_finite=NotFinite(9 - r.rank, "loss = nan")) for r in agent.status.ranks)
        status = replace(agent.status, ranks=ranks)
        world.post_event(events.AgentReported("g", seat.node, agent.incarnation, status))
    world.run_for(0.1)


def reach(world: Scenario, step: int) -> None:
    world.run_until(lambda: world.core.observed.gang("g").step_number >= step)


def test_a_loss_that_is_nan_is_shown_and_accuses_nobody() -> None:
    world = training()
    reach(world, 3)
    for _ in range(2):
        report_not_finite(world)
    (found,) = world.facts(facts.NotFiniteReported)
    where = f"rank {found.rank} on {found.node}"
    assert describe(found) == f"{where} reports loss = nan at step {found.step} of generation 1"
    assert f"loss = nan at step {found.step}, on rank {found.rank} ({found.node})" in shown(world)
    world.run_for(10)
    assert world.gang.newest.generation == 1
    assert world.slurm == []


def test_a_spike_is_recorded_once_and_the_gang_goes_on() -> None:
    world = training()
    reach(world, 60)
    (found,) = world.facts(facts.LossNoted)
    assert (found.kind, 30 <= found.step <= 33, found.value) == (LossKind.SPIKE, True, 8.0)
    assert (found.response, found.why) == (LossResponse.RECORD, "")
    words = f"the loss on {found.node} has a spike at step {found.step}: 8, usually {found.usual:.4g}"
    assert describe(found) == f"generation 1: {words}"
    assert words in shown(world)
    assert world.gang.phase is Phase.RUNNING
    assert world.slurm == []


def test_a_spike_stops_the_job_if_the_job_asks_for_it() -> None:
    world = training("stop", durable_dir="/durable", requeue=True)
    world.run_until(lambda: world.gang.final)
    (found,) = world.facts(facts.LossNoted)
    assert describe(found).endswith("; the job stops")
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)
    assert world.gang.reason == loss_words(found)
    assert world.gang.checkpoint.durable_path


@pytest.mark.parametrize("observe", [False, True])
def test_a_loss_that_is_nan_stops_the_job_if_the_site_says_so(observe: bool) -> None:
    world = Scenario(2, 0, limits=Limits(loss=replace(RULE, not_finite=LossResponse.STOP), observe=observe))
    reach(world, 3)
    report_not_finite(world)
    (found,) = world.facts(facts.NotFiniteReported)
    if observe:
        assert found.why == "observe mode: stop would follow"
        assert world.gang.plans.stop is None
    else:
        world.run_until(lambda: world.gang.final)
        assert world.gang.reason.startswith(f"loss = nan at step {found.step}, on rank {found.rank}")


def test_a_loss_that_falls_no_more_is_on_a_plateau() -> None:
    world = Scenario(2, 0, limits=Limits(loss=replace(RULE, plateau_values=512, plateau=LossResponse.STOP)))
    reach(world, 3)
    for step in range(1, 2000):
        report(world, step, 2.5)
        if world.gang.plans.stop is not None:
            break
    (found,) = world.facts(facts.LossNoted)
    assert describe(found) == (
        f"generation 1: the loss on {found.node} is on a plateau at step {found.step}: 2.5, before 2.5; the job stops"
    )


def test_no_more_findings_of_a_generation_are_recorded_than_the_journal_bears() -> None:
    world = Scenario(2, 0, limits=Limits(loss=replace(RULE, in_a_row=1)))
    reach(world, 3)
    for step in range(1, 4 * FINDINGS_PER_GENERATION):
        report(world, step, 2.5 if step < 20 or step % 2 else 9.0)
    assert len(world.facts(facts.LossNoted)) == FINDINGS_PER_GENERATION
    world.kill_rank("n0")
    world.run_until(lambda: world.gang.newest.generation == 2 and world.gang.phase is Phase.RUNNING)
    for step in range(1, 100):
        report(world, step, 2.5 if step < 99 else 9.0)
    assert len(world.facts(facts.LossNoted)) == FINDINGS_PER_GENERATION + 1


def test_what_is_asked_for_follows_however_much_was_recorded_before() -> None:
    rule = replace(RULE, in_a_row=1, plateau_values=512, plateau=LossResponse.STOP)
    world = Scenario(2, 0, limits=Limits(loss=rule))
    reach(world, 3)
    for step in range(1, 2000):
        report(world, step, 9.0 if step > 20 and step % 20 == 0 else 2.5)
        if world.gang.plans.stop is not None:
            break
    *recorded, last = world.facts(facts.LossNoted)
    assert len(recorded) >= FINDINGS_PER_GENERATION
    assert (last.kind, last.response) == (LossKind.PLATEAU, LossResponse.STOP)


def test_a_restarted_coordinator_knows_the_spike_and_begins_anew_to_compare() -> None:
    world = training()
    reach(world, 40)
    world.restart_coordinator()
    reach(world, 60)
    assert len(world.facts(facts.LossNoted)) == 1
    assert "has a spike at step 3" in shown(world)
    assert world.replayed_state().dump() == world.core.state.dump()


def rolling(
    rule: LossRule = RULE, sampler: bool = True, margin: int = 5, spoiled: tuple[int, int] = (60, 69), **given: object
) -> Scenario:
    """A gang whose loss is high in steps 60 to 69, and which then goes back."""
    settings: dict[str, object] = {"durable_dir": "/durable", "durable_every_steps": 10, **given}
    site = replace(rule, margin_steps=margin, spike=LossResponse.ROLL_BACK)
    world = Scenario(3, 1, limits=Limits(loss=site), **settings)  # type: ignore[arg-type]
    world.spoil_batches(*map(str, spoiled))
    if sampler:
        world.use_sampler()
    return world


def until_generation(world: Scenario, generation: int) -> None:
    world.run_until(lambda: world.gang.newest.generation == generation and world.gang.phase is Phase.RUNNING)


def test_a_spike_takes_the_gang_back_and_its_batches_are_skipped() -> None:
    world = rolling()
    until_generation(world, 2)
    (found,), (back,) = world.facts(facts.LossNoted), world.facts(facts.RolledBack)
    assert (60 <= found.step <= 63, found.response) == (True, LossResponse.ROLL_BACK)
    assert 40 <= back.version.step <= 54
    assert 69 <= back.skip_to <= 79
    start = world.facts(facts.GenerationStarted)[-1]
    assert (start.version, start.durable_path, start.skip_to_step) == (None, back.path, back.skip_to)
    assert f"after the batch of step {back.skip_to}" in describe(start)
    assert f"goes back to step {back.version.step} (generation 1), {back.path}" in describe(back)
    recovery = world.gang.recovery.last
    assert recovery is not None
    assert recovery.step_restored == back.version.step
    assert world.gang.recovery.failures_in_a_row == 0
    reach(world, 90)
    assert len(world.facts(facts.LossNoted)) == 1
    assert world.replayed_state().dump() == world.core.state.dump()


@pytest.mark.parametrize("fault", ["crash", "coordinator", "requeue", "in vain"])
def test_what_follows_a_roll_back_does_not_undo_it(fault: str) -> None:
    """The invariants see a bad batch that is read again, and a version of before that is restored."""
    world = rolling()
    world.run_until(lambda: bool(world.facts(facts.RolledBack)))
    back = world.facts(facts.RolledBack)[0]
    if fault == "coordinator":
        world.restart_coordinator()
    elif fault == "crash":
        until_generation(world, 2)
        world.crash(world.gang.roster.seats[0].node)
    elif fault == "in vain":
        world.run_until(lambda: world.gang.newest.generation == 2)
        world.kill_rank(world.gang.roster.seats[1].node)
    else:
        until_generation(world, 2)
        for seat in world.gang.roster.seats[:2]:
            world.crash(seat.node)
    reach(world, 100) if fault != "requeue" else world.run_for(60)
    starts = world.facts(facts.GenerationStarted)[1:]
    assert all(one.version is None or one.version.generation > back.generation for one in starts)
    assert len(world.facts(facts.RolledBack)) == 1


def test_without_a_sampler_or_a_checkpoint_the_spike_is_recorded_with_the_reason() -> None:
    for world, why in (
        (rolling(sampler=False), "no roll back: the script gives its Checkpoint no ShardedSampler, so no batch"),
        (rolling(durable_every_steps=0), "no roll back: no durable checkpoint of step 5"),
    ):
        reach(world, 75)
        (found,) = world.facts(facts.LossNoted)
        assert found.response is LossResponse.RECORD
        assert found.why.startswith(why)
        assert why in describe(found)
        assert world.gang.newest.generation == 1


def test_a_checkpoint_that_the_job_has_removed_is_no_target() -> None:
    world = rolling(durable_keep=1)
    reach(world, 75)
    (found,) = world.facts(facts.LossNoted)
    assert found.why.startswith("no roll back: no durable checkpoint")


def test_what_was_rolled_back_counts_among_the_checkpoints_that_the_job_keeps() -> None:
    world = rolling(durable_keep=2, margin=10, spoiled=(66, 75))
    until_generation(world, 2)
    spoil_soon_after_a_flush(world)
    assert world.facts(facts.LossNoted)[-1].why.startswith("no roll back: no durable checkpoint of step")


def test_so_does_what_a_flush_completes_after_the_roll_back() -> None:
    world = rolling(durable_keep=2, durable_every_steps=0, flush_s=1.0, margin=10, spoiled=(60, 66))
    for step in (10, 30, 58):
        reach(world, step)
        world.run_until(lambda: not world.gang.checkpoint.is_flushing)
        world.post_event(events.FlushRequested("g", "ann"))
    until_generation(world, 2)
    world.run_for(2)
    assert world.facts(facts.FlushEnded)[-1].error
    world.post_event(events.FlushRequested("g", "ann"))
    spoil_soon_after_a_flush(world)
    assert world.facts(facts.LossNoted)[-1].why.startswith("no roll back: no durable checkpoint of step")


def spoil_soon_after_a_flush(world: Scenario) -> None:
    """The loss is high again, once there is a checkpoint of the running generation."""
    generation = world.gang.newest.generation
    world.run_until(lambda: (world.gang.checkpoint.durable_version or Version(0, 0)).generation == generation)
    batch = world.core.observed.gang("g").step_number + world.gang.restore.skipped_before(generation)
    world.spoil_batches(str(batch + 3), str(batch + 12))
    world.run_until(lambda: len(world.facts(facts.LossNoted)) == 2)


def test_no_target_is_what_a_running_flush_is_about_to_remove() -> None:
    world = rolling(durable_keep=1, durable_every_steps=0, flush_s=3.0)
    reach(world, 20)
    world.post_event(events.FlushRequested("g", "ann"))
    world.run_until(lambda: bool(world.gang.checkpoint.durable_path))
    reach(world, 58)
    world.post_event(events.FlushRequested("g", "ann"))
    world.run_until(lambda: bool(world.facts(facts.LossNoted)))
    assert world.gang.checkpoint.is_flushing
    assert world.facts(facts.LossNoted)[0].why.startswith("no roll back: no durable checkpoint of step")


def test_a_further_spike_goes_back_with_both_ranges_skipped_and_then_the_job_stops() -> None:
    world = rolling(replace(RULE, roll_backs=2))
    until_generation(world, 2)
    for first, generation in ((110, 3), (170, 0)):
        world.spoil_batches(str(first), str(first + 9))
        if generation:
            until_generation(world, generation)
    world.run_until(lambda: world.gang.final, 120)
    one, two = world.facts(facts.RolledBack)
    assert 119 <= two.skip_to <= 129
    ahead = world.gang.restore.skipped_before(2)
    assert ahead == one.skip_to - one.version.step
    assert world.facts(facts.LossNoted)[-1].why == "2 roll backs within 10000 steps, and no more may be"
    assert (world.gang.phase, world.gang.exit_code) == (Phase.FAILED, 98)


def test_a_flush_that_runs_while_the_gang_goes_back_does_not_count() -> None:
    world = rolling(durable_every_steps=0, flush_s=3.0)
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 20)
    world.post_event(events.FlushRequested("g", "ann"))
    world.run_until(lambda: any(fact.path for fact in world.facts(facts.FlushEnded)))
    reach(world, 58)
    world.post_event(events.FlushRequested("g", "ann"))
    until_generation(world, 2)
    world.run_for(10)
    assert world.facts(facts.FlushEnded)[-1].error == "the gang has gone back to an earlier checkpoint meanwhile"
    assert world.facts(facts.RolledBack)[0].version.step < 30


def test_a_loss_that_is_nan_takes_the_gang_back() -> None:
    world = rolling(replace(RULE, not_finite=LossResponse.ROLL_BACK))
    reach(world, 50)
    for seat in world.gang.roster.seats:
        agent = world.core.observed.gang("g").agents[seat.node]
        ranks = tuple(replace(rank, not_finite=NotFinite(48, "loss = nan")) for rank in agent.status.ranks)
        world.post_event(events.AgentReported("g", seat.node, agent.incarnation, replace(agent.status, ranks=ranks)))
    until_generation(world, 2)
    (back,) = world.facts(facts.RolledBack)
    assert (back.step, back.version.step <= 42) == (48, True)
    assert back.reason.startswith("loss = nan at step 48")
