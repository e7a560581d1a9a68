"""What an agent's silence may cost while its gang's ranks train on, and how long that is waited for."""

import pytest

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.states import Phase, Verdict
from muster.daemon.coordinator.simulator.rehearsal import Rehearsal


def training(nodes: int = 4, spares: int = 1, **more: object) -> Rehearsal:
    world = Rehearsal(nodes, spares, hang_after_s=60.0, **more)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.sight.gang("g").step >= 6, 2000.0)
    return world


def stop_services(world: Rehearsal, node: str, *, daemon: bool, stopped: bool = True) -> None:
    """The agent of a node, and perhaps its daemon, stand still; its ranks don't."""
    world.world.stop(world.agent(node), stopped)
    if daemon:
        world.world.stop(world.world.daemons[node], stopped)


def fenced(world: Rehearsal) -> list[str]:
    return [fact.cause for fact in world.facts(f.GenerationFenced)[1:]]


@pytest.mark.parametrize("daemon", [True, False], ids=["agent and daemon", "agent alone"])
@pytest.mark.parametrize("step_s", [0.2, 3.0, 20.0])
def test_a_node_whose_ranks_train_on_stays_whatever_a_step_takes(step_s: float, daemon: bool) -> None:
    world = training(step_s=step_s)
    stop_services(world, "n2", daemon=daemon)
    world.run_for(14.0 + step_s)
    assert fenced(world) == []
    assert world.core.ledger.node("n2").verdict is Verdict.FIT


@pytest.mark.parametrize("daemon", [True, False], ids=["agent and daemon", "agent alone"])
def test_once_two_steps_are_overdue_nothing_speaks_for_it_any_more(daemon: bool) -> None:
    world = training(step_s=3.0)
    stop_services(world, "n2", daemon=daemon)
    world.run_for(14.0)
    world.hang_rank("n2")
    began = world.now
    world.run_until(lambda: bool(fenced(world)))
    assert 3.0 < world.now - began < 8.5
    assert ("hangs" in fenced(world)[0]) is daemon


def test_however_long_a_step_takes_a_hung_node_is_found_after_a_minute() -> None:
    world = training(step_s=90.0)
    world.pause("n2")
    began = world.now
    world.run_until(lambda: bool(fenced(world)), 100.0)
    assert 58.0 < world.now - began < 64.0


def test_after_a_restart_of_the_coordinator_the_first_step_says_how_long_one_may_take() -> None:
    world = training(step_s=6.0)
    world.run_for(1.0)
    world.restart_coordinator()
    stop_services(world, "n2", daemon=True)
    world.run_for(15.0)
    assert fenced(world) == []


def test_a_spare_that_dies_while_steps_are_short_is_counted_on_for_a_minute_and_gets_no_verdict() -> None:
    world = training()
    (spare,) = [seat.node for seat in world.gang.spares]
    world.power_off(spare)
    began = world.now
    world.run_until(lambda: bool(world.gang.members[spare].out), 100.0)
    assert 60.0 < world.now - began < 64.0
    assert world.core.ledger.node(spare).verdict is Verdict.FIT
    assert (world.gang.phase, world.gang.generation) == (Phase.RUNNING, 1)
    assert world.slurm == []


@pytest.mark.parametrize("wire", ["coordinator", "n0"])
def test_a_spare_that_answers_somebody_stays(wire: str) -> None:
    world = training()
    (spare,) = [seat.node for seat in world.gang.spares]
    world.cut((spare, wire), (wire, spare))
    world.run_for(100.0)
    assert not world.gang.members[spare].out
