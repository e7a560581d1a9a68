"""What losses show is recorded, and what the policy or the job asks for follows.

A loss that is NaN or infinite is recorded once a generation, spikes and plateaus each time. None accuses a node: most
come from the training itself. So nothing more follows unless somebody asks for it. A stop is a planned stop: the ranks
finish a step, their state is written, and the job ends.
"""

from muster.daemon.coordinator.core.losses.loss_rule import LossResponse, LossRule
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import NotFinite
from muster.daemon.coordinator.core.state.fact_text import loss_words
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

FINDINGS_PER_GENERATION = 32
"""Spikes and plateaus that are recorded of a generation: the journal is finite."""


def respond(gang_turn: GangTurn) -> None:
    """Record what is new, and plan a stop if that is asked for."""
    rule = gang_turn.gang.spec.loss.over(gang_turn.turn.limits.loss)
    _note_not_finite(gang_turn, rule)
    found = gang_turn.observed.losses.judge(rule) if gang_turn.observed.losses.has_new else []
    for one in found:
        gang = gang_turn.gang
        if gang.findings.losses_noted >= FINDINGS_PER_GENERATION:
            return
        asked = rule.spike if one.kind is LossKind.SPIKE else rule.plateau
        response, why = _possible(gang_turn, asked)
        noted = facts.LossNoted(
            gang.id, gang.newest.generation, one.kind, one.node, one.step, one.value, one.usual, response, why
        )
        gang_turn.turn.record(noted)
        _act(gang_turn, response, loss_words(noted))


def _note_not_finite(gang_turn: GangTurn, rule: LossRule) -> None:
    """Record the first value of the generation that is NaN or infinite."""
    gang, nodes = gang_turn.gang, gang_turn.index.not_finite
    if not nodes or gang.findings.not_finite:
        return
    reports: list[tuple[int, int, str, NotFinite]] = [
        (rank.not_finite.step, rank.rank, node, rank.not_finite)
        for node in nodes
        for rank in gang_turn.observed.status(node).ranks_of(gang.newest.generation)
        if rank.not_finite is not None
    ]
    if reports:
        step, rank, node, found = min(reports, key=lambda report: report[:2])
        response, why = _possible(gang_turn, rule.not_finite)
        gang_turn.turn.record(
            facts.NotFiniteReported(gang.id, gang.newest.generation, rank, node, step, found.words, response, why)
        )
        _act(gang_turn, response, gang.findings.not_finite)


def _possible(gang_turn: GangTurn, asked: LossResponse) -> tuple[LossResponse, str]:
    """What follows, and why that is not what is asked for."""
    if asked is LossResponse.RECORD or gang_turn.gang.plans.stop is not None:
        return LossResponse.RECORD, ""
    if asked is LossResponse.ROLL_BACK:
        return LossResponse.RECORD, "this version of Muster does not roll back"
    if gang_turn.turn.limits.observe:
        return LossResponse.RECORD, f"observe mode: {asked} would follow"
    return asked, ""


def _act(gang_turn: GangTurn, response: LossResponse, reason: str) -> None:
    if response is LossResponse.STOP:
        gang_turn.turn.record(facts.StopPlanned(gang_turn.gang.id, reason, Phase.FAILED))
