"""How long a gang may go without a step, or without one agent's word, before anything follows from it.

All of it is measured by the gang's own pace: what is a long silence of a gang that steps five times a second is the
middle of a step of another one.
"""

from math import inf

from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

HOLD_S = 60.0
"""Longest wait for a cause: where many nodes fall silent at once, or where the next step may prove that all is well."""
OUT_OF_TOUCH_S = 30.0
"""An agent that answers others, but for so long not the coordinator, gives up its place where its gang waits for it."""
STEPS = 20
"""So many steps may pass in which no rank finishes one."""
STRANGE = 10
"""While it is not known how long a step takes (after a coordinator's restart, too), waits are so many times as long."""
FIRST_STEPS = 2
"""A generation may take so many times as long to its first step as the slowest before it."""
DOUBLINGS = 5
"""Each hang in the same place doubles the wait, for it may be a long pause that nobody declared; so often at most."""
TOLD_S = 1.0
"""A step that was made is told within this."""


def stepped(gang_turn: GangTurn) -> bool:
    """The running generation has finished a step."""
    return gang_turn.gang.stepped == gang_turn.gang.generation


def went_on_at(gang_turn: GangTurn) -> float:
    """When a rank last came further, or may have done so unseen."""
    return max(gang_turn.gang.started_at, gang_turn.turn.observed.since, gang_turn.seen.pace.went_on_at)


def allowance_s(gang_turn: GangTurn) -> float:
    """So many seconds may pass until the next step."""
    gang, pace = gang_turn.gang, gang_turn.seen.pace
    least = gang.spec.hang_after_s * (1 if pace.median_s else STRANGE)
    first = 0.0 if stepped(gang_turn) else FIRST_STEPS * gang.first_step_s
    further = stepped(gang_turn) and gang_turn.seen.step > gang.reached
    patience = 1 if further else 2 ** min(gang.failures, DOUBLINGS)
    return float(patience * max(least, STEPS * pace.median_s, pace.longest_s, first))


def moves(gang_turn: GangTurn, member: Member) -> bool:
    """As far as can be told its ranks train on, also those of `member`, whom probes don't find lost.
    A step that takes longer than a round of probes may be under way. It is waited for, though not for ever."""
    if gang_turn.gang.phase not in (Phase.STARTING, Phase.RUNNING) or not stepped(gang_turn):
        return False
    pace, moved_at = gang_turn.seen.pace, max(gang_turn.seen.moved_at, gang_turn.turn.observed.since)
    step_s = pace.median_s or max(pace.longest_s, gang_turn.gang.first_step_s)
    step_s = step_s or moved_at - gang_turn.gang.started_at  # none was seen from its beginning, and none took longer
    held_since = max(moved_at, gang_turn.seen.suspected[member.node])
    return gang_turn.now - moved_at < 2 * step_s + TOLD_S and gang_turn.now - held_since < HOLD_S


def without_s(gang_turn: GangTurn, member: Member) -> float:
    """So many seconds without a word of `member` and without a step show that the gang can't go on without it."""
    gang, index, pace = gang_turn.gang, gang_turn.index, gang_turn.seen.pace
    if index.in_phase - index.unattached - gang_turn.seen.suspected.keys():
        return inf  # others, who are in touch, say why there is no step
    if gang.phase is Phase.DRAINING:
        return OUT_OF_TOUCH_S if member.node in index.unwritten else inf
    if gang.phase is Phase.STARTING or index.done:
        return OUT_OF_TOUCH_S
    # Where a script has never declared a step, or no other node carries ranks, many may be made unseen: the longest
    # wait has to do.
    others = any(seat.node not in index.unattached | {member.node} for seat in gang.seats)
    known = others and pace.median_s > 0 and gang.stepped > 0 and member.node not in index.in_phase
    return max(OUT_OF_TOUCH_S * (1 if known else STRANGE), allowance_s(gang_turn))
