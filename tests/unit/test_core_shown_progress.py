"""How far a gang has come: status shows the same before and after a restart of the coordinator."""

import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.services.views import gang_view
from muster.simulator.scenario import Scenario
from muster.v1 import api_pb2


def view_of(world: Scenario) -> api_pb2.GangView:
    return gang_view(world.core.state, world.core.observed, world.gang, world.now)


def progress_of(world: Scenario) -> tuple[int, int, int]:
    view = view_of(world)
    return view.step, view.committed.generation, view.committed.step


def trained(spares: int = 0) -> Scenario:
    world = Scenario(2, spares)
    world.run_until(lambda: view_of(world).committed.step >= 5)
    return world


def end(world: Scenario, how: str) -> None:
    if how == "cancel":
        world.post_event(events.CancelRequested("g", "a user"))
    elif how == "done":
        world.finish()
    else:
        world.power_off("n1")  # there is no spare
    world.run_until(lambda: world.gang.final or world.gang.phase is Phase.REQUEUED, limit_s=120.0)


@pytest.mark.parametrize("how", ["cancel", "done", "requeue"])
def test_the_end_of_a_gang_keeps_its_progress(how: str) -> None:
    world = trained()
    end(world, how)
    before = progress_of(world)
    assert before[0] >= 5
    assert before[1:] > (1, 0)
    world.restart_coordinator()
    assert progress_of(world) == before


def test_a_recovery_shows_the_progress_of_its_fence() -> None:
    world = trained(spares=1)
    world.kill_rank("n2")
    world.run_until(lambda: world.gang.phase is Phase.RECOVERING)
    before = progress_of(world)
    assert before[0] == world.facts(facts.GenerationFenced)[-1].step_before
    world.restart_coordinator()
    assert progress_of(world) == before


def test_of_a_gang_that_runs_the_agents_tell_the_progress_again() -> None:
    world = trained()
    before = progress_of(world)
    world.restart_coordinator()
    assert view_of(world).waiting_for == "agents to attach again, which tell how far the ranks are"
    world.run_until(lambda: progress_of(world) >= before)
    assert view_of(world).waiting_for == ""


@pytest.mark.parametrize(("how", "state"), [("done", "exited"), ("cancel", "absent")])
def test_the_ranks_of_a_gang_that_is_over_are_the_same_before_a_restart_and_after_it(how: str, state: str) -> None:
    """What ranks of a gang have exited with that is not done, nobody keeps."""
    world = trained()
    end(world, how)
    before = list(view_of(world).ranks)
    assert {(rank.state, rank.exit_code) for rank in before} == {(state, 0)}
    world.restart_coordinator()
    assert list(view_of(world).ranks) == before


def test_progress_of_an_earlier_version_of_the_journal_is_unknown() -> None:
    ended = facts.decode("GangEnded", '{"gang": "g", "phase": "DONE", "exit_code": 0, "reason": ""}')
    assert ended == facts.GangEnded("g", Phase.DONE, 0, "")
    known = facts.GangEnded("g", Phase.DONE, 0, "", facts.Progress(Version(2, 383), Version(2, 380)))
    assert facts.decode(*facts.encode(known)) == known
