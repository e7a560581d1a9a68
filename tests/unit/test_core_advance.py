"""The rounds of one turn: a gang moves until its rules decide nothing more. Rules without an end are reported."""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.transitions import ROUNDS, UNSETTLED_PAUSE_S, advance
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn

NOW = 50.0


def make_gang_turn() -> GangTurn:
    """A turn of a gang that waits for Slurm to start its job."""
    core = Core(DurableState(), 0.0)
    core.decide(events.GangSubmitted("g1", 1, 1000, "train", events.GangSpec(2, 1), "{}"), 1.0)
    return GangTurn(Turn(core.state, core.observed, core.index, NOW), core.state.gangs["g1"])


def rounds(count: int) -> Callable[[GangTurn], None]:
    """Rules that decide something in each of their first `count` rounds."""

    def decide(gang_turn: GangTurn) -> None:
        if len(gang_turn.turn.outcome.facts) < count:
            gang_turn.turn.record(facts.JobChanged(gang_turn.gang.id, (f"n{len(gang_turn.turn.outcome.facts)}",)))

    return decide


def test_rules_run_until_they_decide_nothing_more() -> None:
    gang_turn = make_gang_turn()
    advance(gang_turn, rounds(ROUNDS - 1))
    assert len(gang_turn.turn.outcome.facts) == ROUNDS - 1
    assert gang_turn.turn.outcome.bugs == []
    assert gang_turn.turn.outcome.next_tick_at is None


def test_rules_without_an_end_are_reported_and_the_gang_is_examined_again() -> None:
    gang_turn = make_gang_turn()
    advance(gang_turn, rounds(1000))
    assert len(gang_turn.turn.outcome.facts) == ROUNDS
    assert gang_turn.gang.slurm.job_nodes == (f"n{ROUNDS - 1}",)
    assert gang_turn.turn.outcome.bugs == [
        "gang g1 in phase SUBMITTED: the rules came to no end in 12 rounds, the last of which decided JobChanged; "
        "the gang is looked at again in 1 s"
    ]
    assert gang_turn.turn.outcome.next_tick_at == NOW + UNSETTLED_PAUSE_S
