"""How long a gang may go without a step, or without a word of one agent, before the core acts.

Every timeout follows the gang's own pace: a pause that is long for a gang with five steps a second lies within one step
of another gang.
"""

from math import inf

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import NewestGeneration, RecoveryState
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
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


def last_progress_at(gang_turn: GangTurn) -> float:
    """When a rank last made progress, or may have made it unobserved (seconds)."""
    progressed_at = gang_turn.observed.pace.progressed_at
    return max(gang_turn.gang.newest.started_at, gang_turn.turn.observed.observing_since, progressed_at)


def hang_timeout_s(gang: Gang, seen: ObservedGang) -> float:
    """Seconds that may pass until the next step. After that, the generation may hang."""
    newest, pace = gang.newest, seen.pace
    least = gang.spec.hang_after_s * (1 if pace.median_step_s else UNKNOWN_PACE_FACTOR)
    first = 0.0 if newest.has_finished_step else FIRST_STEP_FACTOR * newest.first_step_s
    doublings = _doublings(newest, gang.recovery, seen)
    return float(doublings * max(least, MISSED_STEPS * pace.median_step_s, pace.longest_gap_s, first))


def idle_timeout_quarters(newest: NewestGeneration, recovery: RecoveryState, seen: ObservedGang) -> int:
    """Quarters of the time that the job allows for which all ranks may be idle. After that, the generation hangs."""
    return 4 * _doublings(newest, recovery, seen)


def _doublings(newest: NewestGeneration, recovery: RecoveryState, seen: ObservedGang) -> int:
    """Factor of a timeout: 2, 4, ... after hangs in the same place."""
    return int(2 ** min(_failures_here(newest, recovery, seen), MOST_DOUBLINGS))


def _failures_here(newest: NewestGeneration, recovery: RecoveryState, seen: ObservedGang) -> int:
    """How many generations in a row have failed before they got further than this one."""
    further = newest.has_finished_step and seen.step_number > recovery.furthest_step
    return 0 if further else recovery.failures_in_a_row


def silent_rank_timeout_s(gang: Gang, seen: ObservedGang, silent_s: int) -> float:
    """Seconds that may pass until the next step while a rank has been silent for `silent_s`, and all others are not.

    Infinite if that silence proves nothing: it is not longer than any before, the generation has finished no step, the
    duration of a step is not known, or a generation has failed here before. That failure may have been a long call
    that keeps the GIL, and the script has not declared it.
    """
    pace = seen.pace
    known = gang.newest.has_finished_step and pace.median_step_s > 0
    least = max(gang.spec.hang_after_s / SILENT_RANK_PART, pace.silences_below_s)
    if not known or silent_s < least or _failures_here(gang.newest, gang.recovery, seen):
        return inf
    return max(SILENT_RANK_STEP_S, SILENT_RANK_STEPS * pace.median_step_s)


def step_may_be_under_way(gang_turn: GangTurn, node: str) -> bool:
    """The gang still trains as far as is known, the ranks on `node` too, and probes do not find `node` lost.

    A step that takes longer than a round of probes may be under way. It is waited for, at most for CAUSE_WAIT_S.
    """
    newest, seen = gang_turn.gang.newest, gang_turn.observed
    if gang_turn.gang.phase not in (Phase.STARTING, Phase.RUNNING) or not newest.has_finished_step:
        return False
    moved_at = max(seen.last_step_at, gang_turn.turn.observed.observing_since)
    step_s = seen.pace.median_step_s or max(seen.pace.longest_gap_s, newest.first_step_s)
    # No whole step was observed, and no step took longer.
    step_s = step_s or moved_at - newest.started_at
    held_since = max(moved_at, seen.suspected_since[node])
    return gang_turn.now - moved_at < 2 * step_s + REPORT_DELAY_S and gang_turn.now - held_since < CAUSE_WAIT_S


def silent_agent_timeout_s(gang: Gang, index: GangIndex, seen: ObservedGang, node: str) -> float:
    """Seconds without a word of the agent on `node` and without a step after which the gang can't go on without it;
    infinite if the gang does not need its word."""
    if index.in_declared_phase - index.unattached - seen.suspected_since.keys():
        return inf  # others, whose agents are in touch, have declared why there is no step
    if gang.phase is Phase.DRAINING:
        return OUT_OF_TOUCH_S if node in index.flush_pending else inf
    if gang.phase is Phase.STARTING or index.exited_cleanly:
        return OUT_OF_TOUCH_S
    # A script that never declares a step, or a gang without another node that carries ranks, may make many steps
    # unobserved: use the longest timeout.
    others = any(seat.node not in index.unattached | {node} for seat in gang.roster.seats)
    paced = seen.pace.median_step_s > 0 and gang.newest.stepped_generation > 0
    known = others and paced and node not in index.in_declared_phase
    return max(OUT_OF_TOUCH_S * (1 if known else UNKNOWN_PACE_FACTOR), hang_timeout_s(gang, seen))
