"""How long a gang may go without a step, or without one agent's word, before anything follows from it.

All of it is measured by the gang's own pace: what is a long silence of a gang that steps five times a second is the
middle of a step of another one.
"""

from math import inf

from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

CAUSE_WAIT_S = 60.0
"""Longest wait for a cause: where many nodes fall silent at once, or where the next step may prove that all is well."""
OUT_OF_TOUCH_S = 30.0
"""An agent that answers others, but for so long not the coordinator, gives up its place where its gang waits for it."""
MISSED_STEPS = 20
"""So many steps may pass in which no rank finishes one."""
UNKNOWN_PACE_FACTOR = 10
"""While it is not known how long a step takes (after a coordinator's restart, too), waits are so many times as long."""
FIRST_STEP_FACTOR = 2
"""A generation may take so many times as long to its first step as the slowest before it."""
MOST_DOUBLINGS = 5
"""Each hang in the same place doubles the wait, for it may be a long pause that nobody declared; so often at most."""
REPORT_DELAY_S = 1.0
"""A step that was made is told within this."""


def has_finished_step(gang_turn: GangTurn) -> bool:
    """The running generation has finished a step."""
    return gang_turn.gang.stepped_generation == gang_turn.gang.generation


def last_progress_at(gang_turn: GangTurn) -> float:
    """When a rank last came further, or may have done so unseen."""
    return max(
        gang_turn.gang.started_at, gang_turn.turn.observed.observing_since, gang_turn.observed.pace.progressed_at
    )


def hang_timeout_s(gang_turn: GangTurn) -> float:
    """So many seconds may pass until the next step."""
    gang, pace = gang_turn.gang, gang_turn.observed.pace
    least = gang.spec.hang_after_s * (1 if pace.median_step_s else UNKNOWN_PACE_FACTOR)
    first = 0.0 if has_finished_step(gang_turn) else FIRST_STEP_FACTOR * gang.first_step_s
    further = has_finished_step(gang_turn) and gang_turn.observed.step_number > gang.furthest_step
    patience = 1 if further else 2 ** min(gang.failures_in_a_row, MOST_DOUBLINGS)
    return float(patience * max(least, MISSED_STEPS * pace.median_step_s, pace.longest_gap_s, first))


def step_may_be_under_way(gang_turn: GangTurn, member: Member) -> bool:
    """As far as can be told its ranks train on, also those of `member`, whom probes don't find lost.
    A step that takes longer than a round of probes may be under way. It is waited for, though not for ever."""
    if gang_turn.gang.phase not in (Phase.STARTING, Phase.RUNNING) or not has_finished_step(gang_turn):
        return False
    pace, moved_at = (
        gang_turn.observed.pace,
        max(gang_turn.observed.last_step_at, gang_turn.turn.observed.observing_since),
    )
    step_s = pace.median_step_s or max(pace.longest_gap_s, gang_turn.gang.first_step_s)
    step_s = step_s or moved_at - gang_turn.gang.started_at  # none was seen from its beginning, and none took longer
    held_since = max(moved_at, gang_turn.observed.suspected_since[member.node])
    return gang_turn.now - moved_at < 2 * step_s + REPORT_DELAY_S and gang_turn.now - held_since < CAUSE_WAIT_S


def silent_agent_timeout_s(gang_turn: GangTurn, member: Member) -> float:
    """So many seconds without a word of `member` and without a step show that the gang can't go on without it."""
    gang, index, pace = gang_turn.gang, gang_turn.index, gang_turn.observed.pace
    if index.in_declared_phase - index.unattached - gang_turn.observed.suspected_since.keys():
        return inf  # others, who are in touch, say why there is no step
    if gang.phase is Phase.DRAINING:
        return OUT_OF_TOUCH_S if member.node in index.flush_pending else inf
    if gang.phase is Phase.STARTING or index.exited_cleanly:
        return OUT_OF_TOUCH_S
    # Where a script has never declared a step, or no other node carries ranks, many may be made unseen: the longest
    # wait has to do.
    others = any(seat.node not in index.unattached | {member.node} for seat in gang.seats)
    known = (
        others and pace.median_step_s > 0 and gang.stepped_generation > 0 and member.node not in index.in_declared_phase
    )
    return max(OUT_OF_TOUCH_S * (1 if known else UNKNOWN_PACE_FACTOR), hang_timeout_s(gang_turn))
