"""The hang detector: every agent answers, and no rank finishes a step.

A stall accuses no node. All agents are probed, and only if each of them answers and still no step comes does the
generation hang. Then its ranks' stacks are written, and it is fenced and restarted in place, as after a crash. The
timeout follows the gang's own pace. A declared phase (evaluation, saving) is never a stall. A script that has never
declared a step, in no generation, is left alone: it may not use the library.
"""

from muster.daemon.coordinator.core.detection import failure_detector, progress_timeouts
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang_index import ranks_of_generation
from muster.daemon.coordinator.core.state.observed_state import AGENT, Stall
from muster.daemon.coordinator.core.state.turn import GangTurn, ProbeRequest

REPORT_DELAY_S = 1.0
"""Seconds after its answer within which an agent that stood still reports the steps made meanwhile."""
STACKS_TIMEOUT_S = 2.0
"""Seconds that the agents have to write the stacks before the fence."""


def detect_hang(gang_turn: GangTurn) -> bool:
    """Look for a stall, probe all agents in one, and end a generation that hangs. True: it was fenced."""
    if gang_turn.gang.hang is not None:
        return _fence_after_stacks(gang_turn)
    if not _may_stall(gang_turn):
        gang_turn.observed.stall = None
        return False
    due = progress_timeouts.last_progress_at(gang_turn) + progress_timeouts.hang_timeout_s(gang_turn) * _exited_factor(
        gang_turn
    )
    if gang_turn.now < due:
        gang_turn.observed.stall = None
        gang_turn.turn.tick_at(due)
    elif gang_turn.observed.stall is None or not gang_turn.observed.stall.unanswered <= gang_turn.index.present:
        _probe_all(gang_turn)  # again if an agent to be waited for was removed: the other answers are old by then
    elif _all_have_answered(gang_turn, gang_turn.observed.stall):
        _record_hang(gang_turn)
    return False


def _may_stall(gang_turn: GangTurn) -> bool:
    """All ranks run and declare steps, and no rank has declared why there would be none."""
    gang, index = gang_turn.gang, gang_turn.index
    known = gang.spec.hang_after_s > 0 and gang.stepped_generation > 0 and gang.stop is None
    return known and not index.unattached and not index.in_declared_phase


def _exited_factor(gang_turn: GangTurn) -> int:
    """Factor of the timeout once some ranks have exited with 0. The other ranks may have much work left without a step,
    or may wait for the ranks that have exited."""
    known = gang_turn.observed.pace.median_step_s > 0  # else the timeout has this factor already
    return progress_timeouts.UNKNOWN_PACE_FACTOR if gang_turn.index.exited_cleanly and known else 1


def _probe_all(gang_turn: GangTurn) -> None:
    """Probe every agent of the gang. Any other message of an agent counts as its answer, too."""
    present = gang_turn.index.present
    gang_turn.observed.stall = Stall(gang_turn.now, set(present))
    for node in sorted(present):
        gang_turn.turn.observed.last_probe_number += 1
        address = gang_turn.gang.members[node].peer_address
        gang_turn.turn.outcome.probe_requests.append(
            ProbeRequest(
                gang_turn.turn.observed.last_probe_number,
                gang_turn.gang.id,
                node,
                (AGENT,),
                address,
                "",
                failure_detector.PROBE_TIMEOUT_S,
            )
        )
    gang_turn.turn.tick_at(gang_turn.now + failure_detector.PROBE_TIMEOUT_S)


def _all_have_answered(gang_turn: GangTurn, stall: Stall) -> bool:
    """Every agent has answered, and had the time to report a step. A silent agent is suspected as any other."""
    asked_after = (
        gang_turn.index.present & gang_turn.observed.suspected_since.keys()
    )  # their last words may be old, from a connection that was cut
    if stall.unanswered or asked_after:
        gang_turn.turn.tick_at(gang_turn.now + REPORT_DELAY_S)
        return False
    stall.answered_at = stall.answered_at or gang_turn.now
    if gang_turn.now < stall.answered_at + REPORT_DELAY_S:
        gang_turn.turn.tick_at(stall.answered_at + REPORT_DELAY_S)
        return False
    return True


def _record_hang(gang_turn: GangTurn) -> None:
    since, node = progress_timeouts.last_progress_at(gang_turn), _held_up_by(gang_turn)
    words = f"hang: no rank has finished a step for {gang_turn.now - since:.0f} s, and every agent answers"
    if node:
        words += f"; the ranks on {node} are a step behind all others"
    if gang_turn.turn.limits.observe:
        words += "; observe mode: the ranks would be restarted in place"
    gang_turn.turn.record(facts.HangDetected(gang_turn.gang.id, gang_turn.gang.generation, words, since, node))
    gang_turn.turn.tick_at(gang_turn.now + STACKS_TIMEOUT_S)


def _held_up_by(gang_turn: GangTurn) -> str:
    """The only node whose ranks are a step behind all others, and hold them up; empty if no single node is."""
    steps = {seat.node: _slowest(gang_turn, seat.node) for seat in gang_turn.gang.seats}
    least = min(steps.values())
    last = [node for node, step in steps.items() if step == least]
    return last[0] if len(last) == 1 < len(steps) else ""


def _slowest(gang_turn: GangTurn, node: str) -> int:
    ranks = ranks_of_generation(gang_turn.observed.status(node).ranks, gang_turn.gang.generation)
    return min((rank.step if rank.progressed else -1 for rank in ranks), default=-1)


def _fence_after_stacks(gang_turn: GangTurn) -> bool:
    """Fence the generation once the stacks are written, or STACKS_TIMEOUT_S have passed. True: it was fenced."""
    hang = gang_turn.gang.hang
    if hang is None or gang_turn.turn.limits.observe:
        return False
    until = max(hang.at, gang_turn.turn.observed.observing_since) + STACKS_TIMEOUT_S
    if gang_turn.index.stacks_missing and gang_turn.now < until:
        gang_turn.turn.tick_at(until)
        return False
    # Agents that miss each other: the network may hold the ranks up as well as the software.
    hardware = bool(gang_turn.index.accusers)
    failure_detector.fence_generation(
        gang_turn, hang.reason, hardware, suspected_at=hang.suspected_at, crashed_on=hang.node
    )
    return True
