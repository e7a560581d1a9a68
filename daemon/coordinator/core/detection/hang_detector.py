"""Hangs: every agent answers, and no rank finishes a step.

A stall accuses nobody: all agents are asked, and only where each of them answers and still nothing moves does the
generation hang. Then its ranks' stacks are kept, and it is fenced and restarted in place, as after a rank's crash. How
long is too long follows from the job's own pace; a declared phase (evaluation, saving) is never a stall. A script that
has never declared a step, in no generation, is left alone: it may not use the library.
"""

from muster.daemon.coordinator.core.detection import failure_detector, progress_timeouts
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.gang_index import of_generation
from muster.daemon.coordinator.core.state.observed_state import AGENT, Stall
from muster.daemon.coordinator.core.state.turn import Ask, GangTurn

SETTLE_S = 1.0
"""Steps that were made while an agent stood still are told within this after its answer."""
STACKS_S = 2.0
"""Agents write stacks within this; a fence waits no longer."""


def watch(gt: GangTurn) -> bool:
    """Look for a stall, ask all agents in one, end a generation that hangs. True: it was fenced."""
    if gt.gang.hang is not None:
        return _end(gt)
    if not _may_stall(gt):
        gt.seen.stall = None
        return False
    due = progress_timeouts.went_on_at(gt) + progress_timeouts.allowance_s(gt) * _strange(gt)
    if gt.now < due:
        gt.seen.stall = None
        gt.turn.wake(due)
    elif gt.seen.stall is None or not gt.seen.stall.unanswered <= gt.tally.present:
        _ask_all(gt)  # anew where who was waited for has gone out: what the others said is old by then
    elif _all_have_answered(gt, gt.seen.stall):
        _found(gt)
    return False


def _may_stall(gt: GangTurn) -> bool:
    """Ranks that declare steps run, all of them, and nobody has said why there would be none."""
    gang, tally = gt.gang, gt.tally
    known = gang.spec.hang_after_s > 0 and gang.stepped > 0 and gang.stop is None
    return known and not tally.unattached and not tally.in_phase


def _strange(gt: GangTurn) -> int:
    """Some ranks have exited well: the others may have much left to do without a step, but they may wait for these."""
    known = gt.seen.pace.median_s > 0  # else the wait is as long already
    return progress_timeouts.STRANGE if gt.tally.done and known else 1


def _ask_all(gt: GangTurn) -> None:
    """Probe every agent of the gang; whatever else comes from one is an answer as well."""
    present = gt.tally.present
    gt.seen.stall = Stall(gt.now, set(present))
    for node in sorted(present):
        gt.turn.sight.probes += 1
        address = gt.gang.members[node].peer_address
        gt.turn.outcome.asks.append(
            Ask(gt.turn.sight.probes, gt.gang.id, node, (AGENT,), address, "", failure_detector.PROBE_S)
        )
    gt.turn.wake(gt.now + failure_detector.PROBE_S)


def _all_have_answered(gt: GangTurn, stall: Stall) -> bool:
    """Each has, and has had the time to tell of a step. Who does not is asked after as anybody who falls silent."""
    asked_after = gt.tally.present & gt.seen.suspected.keys()  # what came of these may be old, from a wire that was cut
    if stall.unanswered or asked_after:
        gt.turn.wake(gt.now + SETTLE_S)
        return False
    stall.answered_at = stall.answered_at or gt.now
    if gt.now < stall.answered_at + SETTLE_S:
        gt.turn.wake(stall.answered_at + SETTLE_S)
        return False
    return True


def _found(gt: GangTurn) -> None:
    since, node = progress_timeouts.went_on_at(gt), _held_up_by(gt)
    words = f"hang: no rank has finished a step for {gt.now - since:.0f} s, and every agent answers"
    if node:
        words += f"; the ranks on {node} are a step behind all others"
    if gt.turn.limits.observe:
        words += "; observe mode: the ranks would be restarted in place"
    gt.turn.record(f.HangFound(gt.gang.id, gt.gang.generation, words, since, node))
    gt.turn.wake(gt.now + STACKS_S)


def _held_up_by(gt: GangTurn) -> str:
    """The only node whose ranks are a step behind all others; empty where no single one is. It holds them all up."""
    steps = {seat.node: _slowest(gt, seat.node) for seat in gt.gang.seats}
    least = min(steps.values())
    last = [node for node, step in steps.items() if step == least]
    return last[0] if len(last) == 1 < len(steps) else ""


def _slowest(gt: GangTurn, node: str) -> int:
    ranks = of_generation(gt.seen.status(node).ranks, gt.gang.generation)
    return min((rank.step if rank.progressed else -1 for rank in ranks), default=-1)


def _end(gt: GangTurn) -> bool:
    """Fence the generation, once the stacks of its ranks are kept or have had their time."""
    hang = gt.gang.hang
    if hang is None or gt.turn.limits.observe:
        return False
    until = max(hang.at, gt.turn.sight.since) + STACKS_S
    if gt.tally.unstacked and gt.now < until:
        gt.turn.wake(until)
        return False
    # Where agents miss each other, the network between them is as likely to hold the ranks up as the software.
    hardware = bool(gt.tally.watchers)
    failure_detector.fence(gt, hang.reason, hardware, suspected_at=hang.suspected_at, crashed_on=hang.node)
    return True
