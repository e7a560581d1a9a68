"""What losses show is recorded, and what the policy or the job asks for follows.

A loss that is NaN or infinite is recorded once a generation, spikes and plateaus each time. None accuses a node: most
come from the training itself. So nothing more follows unless somebody asks for it. A stop is a planned stop: the ranks
finish a step, their state is written, and the job ends. A roll back is `roll_back`'s.
"""

from muster.daemon.coordinator.core.losses.loss_rule import LossResponse, LossRule
from muster.daemon.coordinator.core.losses.loss_watch import LossFinding, LossKind
from muster.daemon.coordinator.core.recovery.losses import roll_back
from muster.daemon.coordinator.core.recovery.losses.roll_back import Trouble
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import NotFinite
from muster.daemon.coordinator.core.state.fact_text import loss_words
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

FINDINGS_PER_GENERATION = 32
"""Spikes and plateaus of a generation that are recorded although nothing follows: the journal is finite."""


def respond(gang_turn: GangTurn) -> bool:
    """Record what is new, and do what is asked for. True: the ranks were fenced."""
    rule = gang_turn.gang.spec.loss.over(gang_turn.turn.limits.loss)
    if _note_not_finite(gang_turn, rule):
        return True
    if not gang_turn.observed.losses.has_new:
        return False
    return any(_note_finding(gang_turn, rule, found) for found in gang_turn.observed.losses.judge(rule))


def _note_finding(gang_turn: GangTurn, rule: LossRule, found: LossFinding) -> bool:
    gang = gang_turn.gang
    asked = rule.spike if found.kind is LossKind.SPIKE else rule.plateau
    trouble = Trouble(found.node, found.step, found.ordinary_step, found.newest_step)
    response, why = _possible(gang_turn, rule, asked, trouble)
    if response is LossResponse.RECORD and gang.findings.losses_noted >= FINDINGS_PER_GENERATION:
        return False
    noted = facts.LossNoted(
        gang.id, gang.newest.generation, found.kind, found.node, found.step, found.value, found.usual, response, why
    )
    gang_turn.turn.record(noted)
    return _act(gang_turn, rule, response, trouble, loss_words(noted))


def _note_not_finite(gang_turn: GangTurn, rule: LossRule) -> bool:
    """Record the first value of the generation that is NaN or infinite."""
    gang, nodes = gang_turn.gang, gang_turn.index.not_finite
    if not nodes or gang.findings.not_finite:
        return False
    reports: list[tuple[int, int, str, NotFinite]] = [
        (rank.not_finite.step, rank.rank, node, rank.not_finite)
        for node in nodes
        for rank in gang_turn.observed.status(node).ranks_of(gang.newest.generation)
        if rank.not_finite is not None
    ]
    if not reports:
        return False
    step, rank, node, found = min(reports, key=lambda report: report[:2])
    ordinary = min(step - 1, gang_turn.observed.losses.ordinary_step or step - 1)
    trouble = Trouble(node, step, ordinary, max(step, gang_turn.observed.step_number))
    response, why = _possible(gang_turn, rule, rule.not_finite, trouble)
    gang_turn.turn.record(
        facts.NotFiniteReported(gang.id, gang.newest.generation, rank, node, step, found.words, response, why)
    )
    return _act(gang_turn, rule, response, trouble, gang.findings.not_finite)


def _possible(gang_turn: GangTurn, rule: LossRule, asked: LossResponse, trouble: Trouble) -> tuple[LossResponse, str]:
    """What follows, and why that is not what is asked for."""
    if asked is LossResponse.RECORD or gang_turn.gang.plans.stop is not None:
        return LossResponse.RECORD, ""
    if gang_turn.turn.limits.observe:
        return LossResponse.RECORD, f"observe mode: {asked} would follow"
    if asked is LossResponse.STOP:
        return asked, ""
    if why := roll_back.why_impossible(gang_turn, rule, trouble):
        return LossResponse.RECORD, why
    why = roll_back.too_many(gang_turn.gang, rule, trouble)
    return (LossResponse.STOP if why else asked), why


def _act(gang_turn: GangTurn, rule: LossRule, response: LossResponse, trouble: Trouble, reason: str) -> bool:
    if response is LossResponse.STOP:
        gang_turn.turn.record(facts.StopPlanned(gang_turn.gang.id, reason, Phase.FAILED))
    elif response is LossResponse.ROLL_BACK:
        roll_back.carry_out(gang_turn, rule, trouble, reason)
    return response is LossResponse.ROLL_BACK
