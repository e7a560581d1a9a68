"""The times of a job and what follows next, as the coordinator's views say them; the ages of its checkpoints."""

from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.limits import Limits, Pool
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.coordinator.slurm import watch
from muster.daemon.coordinator.slurm.watch import job_seen
from muster.simulator.scenario import Scenario
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Job
from muster.v1.api_pb2 import GangView


def view_of(world: Scenario, limits: Limits | None = None, *, brief: bool = False) -> GangView:
    core = world.core
    return gang_view(core.state, core.observed, world.gang, world.now, limits or Limits(), brief=brief)


def trained(spares: int = 1) -> Scenario:
    world = Scenario(2, spares)
    world.run_until(lambda: view_of(world).committed.step >= 3)
    return world


def stepped_after(world: Scenario, generation: int) -> bool:
    return world.gang.newest.generation > generation and world.gang.newest.has_finished_step


def seen_in_slurm(world: Scenario, **found: object) -> None:
    """Slurm says this of the job."""
    gang = world.gang
    job = Job(gang.slurm.job, JobState.RUNNING, nodes=gang.slurm.job_nodes, restart_count=gang.slurm.restart_count)
    world.post_event(job_seen(gang, replace(job, **found)))  # type: ignore[arg-type]


def test_a_run_with_a_limit_says_when_it_ends_and_what_happens_before() -> None:
    world = trained()
    began = world.now - 50
    seen_in_slurm(world, start_time=began, end_time=began + 7200, time_limit_s=7200)
    view = view_of(world)
    assert (view.run_started_s, view.run_ends_s) == (began, began + 7200)
    assert (view.stop_s, view.after_stop) == (began + 7200 - world.gang.spec.stop_before_s, "FAILED")
    assert view.phase_since_s == world.gang.phase_at


def test_a_run_without_a_limit_ends_at_no_known_time() -> None:
    world = trained()
    seen_in_slurm(world, start_time=world.now - 50, end_time=None, time_limit_s=None)
    view = view_of(world)
    assert view.run_started_s == world.now - 50
    assert (view.run_ends_s, view.stop_s, view.after_stop) == (0, 0, "")


@pytest.mark.parametrize(("ahead_s", "shown"), [(2000.0, True), (-5.0, False), (None, False)])
def test_the_expected_start_of_a_queued_job_is_shown_while_it_may_come_true(ahead_s: float | None, shown: bool) -> None:
    world = trained()
    expected = None if ahead_s is None else world.now + ahead_s
    seen_in_slurm(world, state=JobState.PENDING, nodes=(), start_time=expected, reason="Resources")
    view = view_of(world)
    assert view.expected_start_s == (expected if shown else 0)
    assert view.run_started_s == 0


def test_times_of_an_earlier_run_are_not_those_of_this_one() -> None:
    world = trained()
    world.core.observed.gang("g").job_restarts = world.gang.slurm.restart_count + 1
    assert view_of(world).run_started_s == 0


def test_what_follows_if_a_node_fails() -> None:
    world = trained(spares=1)
    assert view_of(world).if_node_fails == "a spare takes its place: 1 is left"
    assert view_of(world, Limits(observe=True)).if_node_fails == "the job ends: the site has Muster in observe mode"
    alone = trained(spares=0)
    pool = Limits(pool=Pool(("--partition=pool",)))
    assert view_of(alone, pool).if_node_fails == "the job is requeued: no spare is left"
    alone.gang.spec = replace(alone.gang.spec, pool_nodes=1)
    assert view_of(alone, pool).if_node_fails == "a node of the shared pool is asked for: no spare is left"
    alone.gang.spec = replace(alone.gang.spec, min_nodes=1)
    assert view_of(alone).if_node_fails == "the job goes on with 1 node or fewer: no spare is left"
    alone.gang.spec = replace(alone.gang.spec, min_nodes=2, requeue=False)
    assert view_of(alone).if_node_fails == "the job ends: no spare is left, and job.toml forbids a requeue"


@pytest.mark.parametrize(
    ("spares", "says"), [(0, "the job is requeued: no spare is left"), (1, "a spare takes its place: 1 is left")]
)
def test_nodes_that_will_train_are_no_spares_before_the_first_generation(spares: int, says: str) -> None:
    world = Scenario(2, spares)
    world.run_until(lambda: world.gang.phase is Phase.PREFLIGHT)
    assert view_of(world).if_node_fails == says


def test_what_happened_is_what_was_said() -> None:
    world = trained(spares=1)
    world.power_off("n2")
    world.run_until(lambda: world.gang.newest.generation == 2 and world.gang.phase is Phase.RUNNING, limit_s=120.0)
    assert view_of(world).recoveries[-1].action == "swap"
    assert view_of(world).if_node_fails == "the job is requeued: no spare is left"


def test_the_age_of_the_newest_checkpoint_in_memory_is_known_once_it_was_seen_to_be_committed() -> None:
    world = trained()
    first = view_of(world)
    assert world.now - 30 < first.checkpoint.committed_s <= world.now
    world.restart_coordinator()
    world.run_until(lambda: view_of(world).committed.step > first.committed.step)
    assert view_of(world).checkpoint.committed_s > first.checkpoint.committed_s


def test_after_a_restart_nobody_knows_when_the_newest_version_was_committed() -> None:
    world = trained()
    world.restart_coordinator()
    world.run_until(lambda: any(agent.attached for agent in world.core.observed.gang("g").agents.values()))
    assert view_of(world).checkpoint.committed_s == 0


def test_a_brief_view_has_no_ranks_and_no_nodes() -> None:
    world = trained(spares=1)
    for node in ("n2", "n0"):
        world.kill_rank(node)
        generation = world.gang.newest.generation
        world.run_until(lambda at=generation: stepped_after(world, at), limit_s=120.0)  # type: ignore[misc]
    whole, brief = view_of(world), view_of(world, brief=True)
    assert (len(brief.ranks), len(brief.nodes), len(brief.recoveries)) == (0, 0, 1)
    assert brief.recoveries[0] == whole.recoveries[-1]
    assert brief.recovery_count == whole.recovery_count == len(whole.recoveries) == 2
    for name in ("ranks", "nodes", "recoveries", "exclusions"):
        whole.ClearField(name)  # type: ignore[arg-type]
        brief.ClearField(name)  # type: ignore[arg-type]
    assert brief == whole


def test_a_time_that_differs_a_little_is_no_change() -> None:
    seen = events.SlurmJobChanged("g", 1, ("n1",), 0, None, 100.0, 50.0, start_at=50.0)
    assert watch._unchanged(seen, replace(seen, start_at=51.0, limit_at=101.0))
    assert not watch._unchanged(seen, replace(seen, start_at=60.0))
    assert not watch._unchanged(seen, replace(seen, start_at=None))
    assert not watch._unchanged(None, seen)
