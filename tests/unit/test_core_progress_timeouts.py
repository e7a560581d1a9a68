"""Progress timeouts: what the silence of an agent costs while the ranks train on, and after how long."""

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario


def training(nodes: int = 4, spares: int = 1, **more: object) -> Scenario:
    world = Scenario(nodes, spares, hang_after_s=60.0, **more)  # type: ignore[arg-type]
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 6, 2000.0)
    return world


def stop_services(world: Scenario, node: str, *, daemon: bool, stopped: bool = True) -> None:
    """The agent of a node, and perhaps the daemon, are frozen; the ranks are not."""
    world.world.set_stopped(world.agent(node), stopped)
    if daemon:
        world.world.set_stopped(world.world.daemons[node], stopped)


def fenced(world: Scenario) -> list[str]:
    return [fact.cause for fact in world.facts(facts.GenerationFenced)[1:]]


@pytest.mark.parametrize("daemon", [True, False], ids=["agent and daemon", "agent alone"])
@pytest.mark.parametrize("step_s", [0.2, 3.0, 20.0])
def test_a_node_whose_ranks_train_on_stays_whatever_a_step_takes(step_s: float, daemon: bool) -> None:
    world = training(step_s=step_s)
    stop_services(world, "n2", daemon=daemon)
    world.run_for(14.0 + step_s)
    assert fenced(world) == []
    assert world.core.state.node("n2").health is NodeHealth.FIT


@pytest.mark.parametrize("daemon", [True, False], ids=["agent and daemon", "agent alone"])
def test_once_two_steps_are_overdue_the_node_is_no_longer_spared(daemon: bool) -> None:
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


def test_after_a_restart_of_the_coordinator_the_first_step_sets_the_pace() -> None:
    world = training(step_s=6.0)
    world.run_for(1.0)
    world.restart_coordinator()
    stop_services(world, "n2", daemon=True)
    world.run_for(15.0)
    assert fenced(world) == []


def test_a_coordinator_started_during_the_first_step_gives_the_second_as_much_time() -> None:
    world = Scenario(4, 1, hang_after_s=60.0, step_s=6.0)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.restart_coordinator()
    world.run_for(3.0)
    stop_services(world, "n2", daemon=True)
    world.run_until(lambda: world.gang.newest.stepped_generation == 1)
    world.run_for(5.0)
    assert fenced(world) == []


def test_a_spare_that_dies_while_steps_are_short_is_removed_after_a_minute_without_a_verdict() -> None:
    world = training()
    (spare,) = [seat.node for seat in world.gang.roster.spares]
    world.power_off(spare)
    began = world.now
    world.run_until(lambda: world.gang.roster.members[spare].removed, 100.0)
    assert 60.0 < world.now - began < 64.0
    assert world.core.state.node(spare).health is NodeHealth.FIT
    assert (world.gang.phase, world.gang.newest.generation) == (Phase.RUNNING, 1)
    assert world.slurm == []


@pytest.mark.parametrize("wire", ["coordinator", "n0"])
def test_a_spare_that_answers_any_witness_stays(wire: str) -> None:
    world = training()
    (spare,) = [seat.node for seat in world.gang.roster.spares]
    world.cut((spare, wire), (wire, spare))
    world.run_for(100.0)
    assert not world.gang.roster.members[spare].removed


def test_one_cut_link_costs_no_node_while_the_others_are_in_a_declared_phase() -> None:
    world = training()
    world.declared_phase("200")
    world.run_for(3.0)
    world.cut_from_coordinator("n2", 100.0)
    world.run_for(120.0)
    assert fenced(world) == []
    assert not world.gang.roster.members["n2"].removal_reason


def test_one_cut_link_costs_no_node_in_the_middle_of_a_long_step() -> None:
    world = training(step_s=80.0)
    world.cut_from_coordinator("n2", 60.0)
    world.run_for(60.0)
    assert fenced(world) == []


def test_a_cut_link_costs_a_node_once_its_gang_stands_still_for_longer_than_its_pace_explains() -> None:
    world = training()
    world.hang_rank("n2")
    world.cut_from_coordinator("n2", 59.0)
    assert fenced(world) == []
    world.cut_from_coordinator("n2", 10.0)
    assert "the coordinator has not reached it for" in fenced(world)[0]
    assert world.gang.roster.members["n2"].removal_reason


def test_where_the_other_ranks_are_done_one_silent_agent_is_awaited_for_half_a_minute() -> None:
    world = training()
    for node in ("n0", "n1", "n4"):
        world.world.schedule.call_later(0.1, world.kill_rank, node, 0)
    world.cut_from_coordinator("n2", 29.0)
    assert fenced(world) == []
    world.cut_from_coordinator("n2", 40.0)
    assert "the coordinator has not reached it for" in fenced(world)[0]


def test_a_silent_agents_own_declared_phase_is_trusted_for_long_but_not_for_ever() -> None:
    world = training()
    world.hang_rank("n2")
    world.report_phase("n2", "saving")
    world.run_for(1.0)
    world.cut_from_coordinator("n2", 290.0)
    assert fenced(world) == []
    world.cut_from_coordinator("n2", 40.0)
    assert "the coordinator has not reached it for" in fenced(world)[0]


def test_a_script_that_declares_no_steps_is_given_five_minutes() -> None:
    world = Scenario(4, 1)
    world.run_until(lambda: world.gang.phase is Phase.RUNNING)
    world.hang_rank("n1")
    world.run_for(1000.0)
    world.cut_from_coordinator("n2", 290.0)
    assert fenced(world) == []


def test_where_no_other_node_carries_ranks_the_longest_timeout_holds() -> None:
    world = training(nodes=1, spares=2)
    world.cut_from_coordinator("n0", 100.0)
    assert fenced(world) == []
