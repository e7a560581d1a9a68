"""How long a gang may go without a step, or without a word of one agent, before the core acts.

Every timeout follows the gang's own pace: a pause that is long for a gang with five steps a second lies within one step
of another gang.
"""

from math import inf

from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

CAUSE_WAIT_S = 60.0
"""Seconds to wait, at most, for the cause of a silence to show: if many nodes fall silent at once, or if the next step
may prove that nothing is wrong."""
OUT_OF_TOUCH_S = 30.0
"""Seconds without contact to the coordinator after which an agent that answers others loses its place, if its gang
waits for it."""
MISSED_STEPS = 20
"""Number of median steps without a finished step that a gang may take."""
UNKNOWN_PACE_FACTOR = 10
"""Timeouts are this many times as long while the duration of a step is not known, as after the coordinator's
restart."""
FIRST_STEP_FACTOR = 2
"""A generation may take this many times as long to its first step as the slowest generation before it."""
MOST_DOUBLINGS = 5
"""Number of doublings, at most. Each hang in the same place doubles the timeout, because it may be a long pause that
the script does not declare."""
SILENT_RANK_PART = 7.5
"""A rank, and no other one, is silent for `hang_after_s` by this, before the gang hangs there: 8 s by default. A job
that allows longer pauses allows longer silences."""
SILENT_RANK_STEPS, SILENT_RANK_STEP_S = 2, 5.0
"""Median steps, and seconds, that the gang may take without a finished step while a rank is silent."""
REPORT_DELAY_S = 1.0
"""Seconds within which a finished step is reported."""


def has_finished_step(gang_turn: GangTurn) -> bool:
    """The running generation has finished a step."""
    return gang_turn.gang.newest.stepped_generation == gang_turn.gang.newest.generation


def last_progress_at(gang_turn: GangTurn) -> float:
    """When a rank last made progress, or may have made it unobserved (seconds)."""
    return max(
        gang_turn.gang.newest.started_at, gang_turn.turn.observed.observing_since, gang_turn.observed.pace.progressed_at
    )


def hang_timeout_s(gang_turn: GangTurn) -> float:
    """Seconds that may pass until the next step. After that, the generation may hang."""
    gang, pace = gang_turn.gang, gang_turn.observed.pace
    least = gang.spec.hang_after_s * (1 if pace.median_step_s else UNKNOWN_PACE_FACTOR)
    first = 0.0 if has_finished_step(gang_turn) else FIRST_STEP_FACTOR * gang.newest.first_step_s
    return float(_doublings(gang_turn) * max(least, MISSED_STEPS * pace.median_step_s, pace.longest_gap_s, first))


def idle_timeout_quarters(gang_turn: GangTurn) -> int:
    """Quarters of the time that the job allows for which all ranks may be idle. After that, the generation hangs."""
    return 4 * _doublings(gang_turn)


def _doublings(gang_turn: GangTurn) -> int:
    """Factor of a timeout: 2, 4, ... after hangs in the same place."""
    return int(2 ** min(_failures_here(gang_turn), MOST_DOUBLINGS))


def _failures_here(gang_turn: GangTurn) -> int:
    """How many generations in a row have failed before they got further than this one."""
    further = has_finished_step(gang_turn) and gang_turn.observed.step_number > gang_turn.gang.recovery.furthest_step
    return 0 if further else gang_turn.gang.recovery.failures_in_a_row


def silent_rank_timeout_s(gang_turn: GangTurn, silent_s: int) -> float:
    """Seconds that may pass until the next step while a rank has been silent for `silent_s`, and all others are not.

    Infinite if that silence proves nothing: it is not longer than any before, the generation has finished no step, the
    duration of a step is not known, or a generation has failed here before. That failure may have been a long call
    that keeps the GIL, and the script has not declared it.
    """
    pace, known = gang_turn.observed.pace, has_finished_step(gang_turn) and gang_turn.observed.pace.median_step_s > 0
    least = max(gang_turn.gang.spec.hang_after_s / SILENT_RANK_PART, pace.silences_below_s)
    if not known or silent_s < least or _failures_here(gang_turn) or gang_turn.index.exited_cleanly:
        return inf
    return max(SILENT_RANK_STEP_S, SILENT_RANK_STEPS * pace.median_step_s)


def step_may_be_under_way(gang_turn: GangTurn, member: Member) -> bool:
    """The gang still trains as far as is known, the ranks of `member` too, and probes do not find `member` lost.

    A step that takes longer than a round of probes may be under way. It is waited for, at most for CAUSE_WAIT_S.
    """
    if gang_turn.gang.phase not in (Phase.STARTING, Phase.RUNNING) or not has_finished_step(gang_turn):
        return False
    pace, moved_at = (
        gang_turn.observed.pace,
        max(gang_turn.observed.last_step_at, gang_turn.turn.observed.observing_since),
    )
    step_s = pace.median_step_s or max(pace.longest_gap_s, gang_turn.gang.newest.first_step_s)
    # No whole step was observed, and no step took longer.
    step_s = step_s or moved_at - gang_turn.gang.newest.started_at
    held_since = max(moved_at, gang_turn.observed.suspected_since[member.node])
    return gang_turn.now - moved_at < 2 * step_s + REPORT_DELAY_S and gang_turn.now - held_since < CAUSE_WAIT_S


def silent_agent_timeout_s(gang_turn: GangTurn, member: Member) -> float:
    """Seconds without a word of `member` and without a step after which the gang can't go on without it; infinite if
    the gang does not need its word."""
    gang, index, pace = gang_turn.gang, gang_turn.index, gang_turn.observed.pace
    if index.in_declared_phase - index.unattached - gang_turn.observed.suspected_since.keys():
        return inf  # others, whose agents are in touch, have declared why there is no step
    if gang.phase is Phase.DRAINING:
        return OUT_OF_TOUCH_S if member.node in index.flush_pending else inf
    if gang.phase is Phase.STARTING or index.exited_cleanly:
        return OUT_OF_TOUCH_S
    # A script that never declares a step, or a gang without another node that carries ranks, may make many steps
    # unobserved: use the longest timeout.
    others = any(seat.node not in index.unattached | {member.node} for seat in gang.roster.seats)
    known = (
        others
        and pace.median_step_s > 0
        and gang.newest.stepped_generation > 0
        and member.node not in index.in_declared_phase
    )
    return max(OUT_OF_TOUCH_S * (1 if known else UNKNOWN_PACE_FACTOR), hang_timeout_s(gang_turn))
