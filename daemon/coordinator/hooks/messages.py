"""What hooks are told: one message for each fact that somebody may want to act on. Pure.

A job's name, its reasons and its causes are words of its owner. They stand in the JSON alone, never in a command line
or in an environment variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Recovery
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.policy.hooks import Occasion
from muster.node_health import OUT_OF_SERVICE

FORMAT = 1
"""The version of the message. Keys are added without a change of it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `at`: seconds since the epoch. `text`: one line for people. `job`, `node`: 0 and empty if it
    concerns none. `details`: what else is known, as JSON values."""

    occasion: Occasion
    at: float
    text: str
    job: int = 0
    node: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The message as a hook gets it."""
        return {"format": FORMAT, **asdict(self)}


def messages(decided: Sequence[facts.Fact], state: DurableState, at: float) -> Iterator[Message]:
    """What hooks are told of the facts `decided`, which are applied to `state`."""
    for fact in decided:
        occasion = _occasion(fact)
        if occasion is None:
            continue
        gang = state.gangs.get(getattr(fact, "gang", ""))
        details = _of_gang(gang) if gang is not None else {}
        if isinstance(fact, facts.GenerationStarted):
            recovery = gang.recovery.last if gang is not None else None
            if recovery is None or recovery.generation != fact.generation:
                continue  # the first start, after which nothing had to be mended
            details["recovery"] = _of_recovery(recovery)
        job = gang.slurm.job if gang is not None else 0
        yield Message(occasion, at, describe(fact), job, getattr(fact, "node", ""), details)


def _occasion(fact: facts.Fact) -> Occasion | None:
    match fact:
        case facts.GenerationStarted(action="swap" | "planned swap"):
            return "swap"
        case facts.GenerationStarted():
            return "restart"
        case facts.PhaseChanged(phase=Phase.REQUEUED):
            return "requeue"
        case facts.GangEnded(phase=Phase.FAILED):
            return "failure"
        case facts.GangEnded():
            return "end"
        case facts.NodeJudged(health=health) if health in OUT_OF_SERVICE:
            return "node"
        case facts.ActionWithheld():
            return "fleet"
        case facts.NotFiniteReported() | facts.LossNoted():
            return "loss"
        case _:
            return None


def _of_gang(gang: Gang) -> dict[str, Any]:
    return {
        "gang": gang.id,
        "name": gang.account.name,
        "owner_uid": gang.account.owner_uid,
        "phase": gang.phase.value,
        "generation": gang.newest.generation,
        "exit_code": gang.exit_code if gang.final else None,
        "nodes": [seat.node for seat in gang.roster.seats],
    }


def _of_recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "action": recovery.action,
        "cause": recovery.cause,
        "nodes_out": recovery.nodes_out,
        "nodes_in": recovery.nodes_in,
        "detected_at": recovery.detected_at,
        "started_at": recovery.started_at,
        "step_before": recovery.step_before,
        "step_restored": recovery.step_restored,
    }
