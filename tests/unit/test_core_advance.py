"""The rounds of one turn: a gang moves until its rules decide nothing more. Rules without an end are reported."""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.transitions import ROUNDS, UNSETTLED_PAUSE_S, advance
from muster.daemon.coordinator.core.state import events as e
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.durable_state import Ledger
from muster.daemon.coordinator.core.state.turn import GangTurn, Turn

NOW = 50.0


def gang_turn() -> GangTurn:
    """A turn of a gang that waits for Slurm to start its job."""
    core = Core(Ledger(), 0.0)
    core.decide(e.GangSubmitted("g1", 1, 1000, "train", e.GangSpec(2, 1), "{}"), 1.0)
    return GangTurn(Turn(core.ledger, core.sight, core.tallies, NOW), core.ledger.gangs["g1"])


def rounds(count: int) -> Callable[[GangTurn], None]:
    """Rules that decide something in each of their first `count` rounds."""

    def decide(gt: GangTurn) -> None:
        if len(gt.turn.outcome.facts) < count:
            gt.turn.record(f.JobChanged(gt.gang.id, (f"n{len(gt.turn.outcome.facts)}",)))

    return decide


def test_rules_that_come_to_an_end_are_followed_to_it() -> None:
    gt = gang_turn()
    advance(gt, rounds(ROUNDS - 1))
    assert len(gt.turn.outcome.facts) == ROUNDS - 1
    assert gt.turn.outcome.bugs == []
    assert gt.turn.outcome.due is None


def test_rules_without_an_end_are_reported_and_the_gang_is_looked_at_again() -> None:
    gt = gang_turn()
    advance(gt, rounds(1000))
    assert len(gt.turn.outcome.facts) == ROUNDS
    assert gt.gang.job_nodes == (f"n{ROUNDS - 1}",)
    assert gt.turn.outcome.bugs == [
        "gang g1 in phase SUBMITTED: the rules came to no end in 12 rounds, the last of which decided JobChanged; "
        "the gang is looked at again in 1 s"
    ]
    assert gt.turn.outcome.due == NOW + UNSETTLED_PAUSE_S
