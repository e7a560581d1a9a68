"""A job that goes on from the checkpoint of an earlier run: another gang wrote it, and counted its generations."""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.scenario import Scenario

PATH = "/durable/step_00000176_g5_train-u0-0123456789ab"


def resumed(**given: object) -> Scenario:
    world = Scenario(2, 1, durable_dir="/durable", resume_from=PATH, **given)  # type: ignore[arg-type]
    world.world.durable_storage.add("g", PATH, Version(5, 176))
    return world


def test_the_first_generation_starts_from_it_and_what_follows_is_newer() -> None:
    world = resumed(time_limit_s=60, stop_before_s=10.0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    (start,) = world.facts(facts.GenerationStarted)
    assert (start.version, start.durable_path) == (None, PATH)
    assert f"starts from {PATH}" in describe(start)
    world.run_until(lambda: world.gang.final)
    assert world.gang.exit_code == 98
    assert world.gang.checkpoint.durable_version is not None
    assert world.gang.checkpoint.durable_version.generation == 1
    assert world.gang.checkpoint.durable_version.step > 176
    assert world.gang.checkpoint.durable_path != PATH


def test_a_fault_before_anything_is_kept_takes_it_again() -> None:
    world = resumed()
    world.run_until(lambda: world.gang.phase is Phase.STARTING)
    world.crash("n0")
    world.run_until(lambda: world.gang.newest.generation == 2)
    assert [fact.durable_path for fact in world.facts(facts.GenerationStarted)] == [PATH, PATH]


def test_a_planned_stop_without_a_durable_folder_says_that_all_is_lost() -> None:
    world = Scenario(2, 1, time_limit_s=60, stop_before_s=10.0)
    world.run_until(lambda: world.gang.final)
    assert world.gang.exit_code == 98
    assert "all steps are lost, because the job has no durable_dir" in world.gang.reason


def test_events_say_whose_checkpoint_was_loaded() -> None:
    restored = facts.StateRestored("g", 1, Version(5, 176), 0, 0, 0, (), 1.5, folder=PATH, loaded_bytes=1024)
    assert describe(restored) == (
        f"generation 1 has loaded {PATH}, a checkpoint of gang train-u0-0123456789ab: 1.0 KiB in 1.5 s"
    )
    own = facts.StateRestored("train-u0-0123456789ab", 1, Version(5, 176), 0, 0, 0, (), 1.5, folder=PATH)
    assert describe(own) == f"generation 1 has loaded {PATH}: 0.0 KiB in 1.5 s"
