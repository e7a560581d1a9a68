"""Precursors that end: the node is FIT again, in simulated worlds."""

from functools import partial

from tests.unit import training_worlds

from muster.daemon.coordinator.core.detection.hardware_signals import PRECURSORS_KEPT
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.node_health import NodeHealth
from muster.simulator.scenario import Scenario

training = partial(training_worlds.training, nodes=3, spares=0)


def report(world: Scenario, response: str, reason: str) -> None:
    world.precursor("n1", response, reason)
    world.run_for(0.1)


def end(world: Scenario, reason: str) -> None:
    world.precursor_over("n1", reason)
    world.run_for(0.1)


def seen(world: Scenario) -> tuple[NodeHealth, str, Response]:
    node = world.core.state.node("n1")
    return node.health, node.reason, node.response


def test_a_node_is_fit_when_its_precursor_is_over() -> None:
    world = training()
    report(world, "record", "throttled")
    end(world, "throttled")
    assert seen(world) == (NodeHealth.FIT, "throttled: over", Response.RECORD)
    assert world.core.index.degraded == set()
    assert world.replayed_state() == world.core.state


def test_a_node_stays_degraded_while_another_precursor_holds_and_shows_the_strongest() -> None:
    world = training()
    report(world, "record", "hot")
    report(world, "swap", "throttled")
    report(world, "record", "slow link")
    assert seen(world) == (NodeHealth.DEGRADED, "throttled", Response.SWAP)
    end(world, "throttled")
    assert seen(world) == (NodeHealth.DEGRADED, "hot", Response.RECORD)
    end(world, "hot")
    end(world, "slow link")
    assert seen(world)[0] is NodeHealth.FIT
    assert world.replayed_state() == world.core.state


def test_a_signal_that_is_repeated_is_recorded_once_and_again_if_more_follows() -> None:
    world = training()
    report(world, "record", "hot")
    report(world, "record", "hot")
    report(world, "flush", "hot")
    assert [fact.response for fact in world.facts(facts.NodeJudged)] == [Response.RECORD, Response.FLUSH]


def test_the_end_of_what_was_never_reported_changes_nothing() -> None:
    world = training()
    report(world, "record", "hot")
    end(world, "throttled")
    assert seen(world)[0] is NodeHealth.DEGRADED
    assert world.facts(facts.PrecursorEnded) == []


def test_no_spare_takes_the_place_of_a_node_whose_precursor_is_over() -> None:
    world = training(spares=1)
    spare = next(
        node for node in world.gang.roster.members if node not in {seat.node for seat in world.gang.roster.seats}
    )
    world.pause(spare)
    world.run_until(lambda: spare in world.core.observed.gang("g").suspected_since)
    report(world, "swap", "throttled")
    end(world, "throttled")
    world.resume(spare)
    world.run_for(10)
    assert world.gang.newest.generation == 1


def test_if_the_precursor_ends_while_the_ranks_leave_they_start_again_where_they_were() -> None:
    world = training(spares=1)
    before = [seat.node for seat in world.gang.roster.seats]
    world.precursor("n1", "swap", "throttled")
    world.run_until(lambda: world.gang.plans.swap is not None)
    end(world, "throttled")
    world.run_until(lambda: world.gang.newest.stepped_generation == 2)
    assert [seat.node for seat in world.gang.roster.seats] == before
    recovery = world.gang.recovery.recoveries[-1]
    assert recovery.cause == "throttled; n1 keeps its ranks, because what was reported of it is over"
    assert recovery.step_restored == recovery.step_before


def test_a_node_keeps_so_many_precursors_and_always_the_strongest() -> None:
    world = training()
    for number in range(PRECURSORS_KEPT + 5):
        report(world, "record", f"signal {number}")
    assert len(world.core.state.node("n1").precursors) == PRECURSORS_KEPT
    report(world, "swap", "throttled")
    assert seen(world) == (NodeHealth.DEGRADED, "throttled", Response.SWAP)
