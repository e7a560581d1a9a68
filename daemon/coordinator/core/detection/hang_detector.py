"""The hang detector: every agent answers, and no rank finishes a step.

A stall accuses no node. All agents are probed, and only if each of them answers and still no step comes does the
generation hang. Then its ranks' stacks are written, and it is fenced and restarted in place, as after a crash. The
timeout follows the gang's own pace. It is short if one rank alone sends no signs of life: no Python runs in that rank,
and the others wait for it. The hang then counts against that rank's node, as a crash there would. So it does if the
stacks show one rank elsewhere while all others wait for other ranks, or if one rank has entered fewer collectives than
all others.

A declared phase (evaluation, saving) is never a stall. A script that has never declared a step, in no generation, may
not use the library. It is left alone, unless its job asks for more: then a generation stalls as well if all its ranks
have been idle for as long as the job allows. Idleness names no rank: those that wait are as idle as the one that hangs.

Stacks are written before the fence, not with it. On a faster node ranks would end while the stacks of others are
written, and those stacks would show the end of a connection.

A long call that nobody declared, and that keeps the GIL, costs one restart: no silence that ended by itself counts, and
after one failure in a place a silent rank shortens nothing there.
"""

from dataclasses import dataclass

from muster.daemon.coordinator.core.detection import failure_detector, progress_timeouts
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import RankState
from muster.daemon.coordinator.core.state.observed_state import AGENT, Stall
from muster.daemon.coordinator.core.turn.gang_index import ranks_of_generation
from muster.daemon.coordinator.core.turn.turn import GangTurn, ProbeRequest

REPORT_DELAY_S = 1.0
"""Seconds after its answer within which an agent that stood still reports the steps made meanwhile."""
SILENT_RANK_S = 8
"""Seconds without a sign of life after which no Python runs in a rank. A sign comes each second, and few calls keep the
GIL for longer. The next shorter silence that agents report, 4 s, may be one of a busy machine."""
STACKS_TIMEOUT_S = 2.0
"""Seconds that the agents have to write the stacks before the fence."""


def detect_hang(gang_turn: GangTurn) -> bool:
    """Look for a stall, probe all agents in one, and end a generation that hangs. True: it was fenced."""
    if gang_turn.gang.findings.hang is not None:
        return _fence_after_stacks(gang_turn)
    if not _may_stall(gang_turn):
        gang_turn.observed.stall = None
        return False
    due = _due(gang_turn)
    if gang_turn.now < due:
        gang_turn.observed.stall = None
        gang_turn.turn.tick_at(due)
    elif gang_turn.observed.stall is None or not gang_turn.observed.stall.unanswered <= gang_turn.index.present:
        _probe_all(gang_turn)  # again if an agent to be waited for was removed: the other answers are old by then
    elif _all_have_answered(gang_turn, gang_turn.observed.stall):
        _record_hang(gang_turn)
    return False


def _may_stall(gang_turn: GangTurn) -> bool:
    """All ranks run and declare steps, or are idle, and no rank has declared why there would be no step."""
    gang, index = gang_turn.gang, gang_turn.index
    known = gang.plans.stop is None and (_declares_steps(gang_turn) or _idle_for_long(gang_turn))
    return known and not index.unattached and not index.in_declared_phase


def _declares_steps(gang_turn: GangTurn) -> bool:
    """The job wants hangs to be found by missing steps, and its script has declared a step."""
    return gang_turn.gang.spec.hang_after_s > 0 and gang_turn.gang.newest.stepped_generation > 0


def _idle_for_long(gang_turn: GangTurn) -> bool:
    """The job limits for how long its ranks may be idle, and all of them have been idle for that long."""
    allowed = progress_timeouts.idle_timeout_quarters(gang_turn)
    return gang_turn.gang.spec.hang_after_idle_s > 0 and gang_turn.index.idle_quarters() >= allowed


def _due(gang_turn: GangTurn) -> float:
    """When the agents have to be asked (seconds)."""
    if _idle_for_long(gang_turn):
        return gang_turn.now
    return progress_timeouts.last_progress_at(gang_turn) + _timeout_s(gang_turn)


def _timeout_s(gang_turn: GangTurn) -> float:
    timeout_s = progress_timeouts.hang_timeout_s(gang_turn) * _exited_factor(gang_turn)
    if (silent := _silent_rank(gang_turn)) is not None:
        timeout_s = min(timeout_s, progress_timeouts.silent_rank_timeout_s(gang_turn, silent.silent_s))
    return timeout_s


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
        address = gang_turn.gang.roster.members[node].peer_address
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
    since, silent = progress_timeouts.last_progress_at(gang_turn), _silent_rank(gang_turn)
    node = silent.node if silent is not None else _held_up_by(gang_turn)
    words = f"hang: no rank has finished a step for {gang_turn.now - since:.0f} s, and every agent answers"
    if _idle_for_long(gang_turn):
        idle_s = gang_turn.index.idle_quarters() * gang_turn.gang.spec.hang_after_idle_s / 4
        since, node = max(gang_turn.gang.newest.started_at, gang_turn.now - idle_s), ""
        words = f"hang: all ranks have been idle for {idle_s:.0f} s or more, and every agent answers"
    elif silent is not None:
        words += f"; rank {silent.rank} on {node} has run no Python for {silent.silent_s} s or more, all others do"
    elif node:
        words += f"; the ranks on {node} are a step behind all others"
    if gang_turn.turn.limits.observe:
        words += "; observe mode: the ranks would be restarted in place"
    gang_turn.turn.record(facts.HangDetected(gang_turn.gang.id, gang_turn.gang.newest.generation, words, since, node))
    gang_turn.turn.tick_at(gang_turn.now + STACKS_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _SilentRank:
    """The only rank of the running generation that sends no signs of life. `silent_s`: for how long, rounded down."""

    node: str
    rank: int
    silent_s: int


def _silent_rank(gang_turn: GangTurn) -> _SilentRank | None:
    """The rank that has been silent for long while every other rank of the gang sends signs of life; None: there is no
    such rank. If several are silent, a node or all of them may be short of processors."""
    gang, index = gang_turn.gang, gang_turn.index
    if index.silent != 1 or index.signing != gang.ranks - 1 or gang.ranks == 1:
        return None
    (node,) = index.with_silent_rank
    ranks = ranks_of_generation(gang_turn.observed.status(node).ranks, gang.newest.generation)
    rank, silent_s = next((rank.rank, rank.silent_s) for rank in ranks if rank.running and rank.silent_s)
    return _SilentRank(node, rank, silent_s) if silent_s >= SILENT_RANK_S else None


def _held_up_by(gang_turn: GangTurn) -> str:
    """The only node whose ranks are a step behind all others, and hold them up; empty if no single node is."""
    steps = {seat.node: _slowest(gang_turn, seat.node) for seat in gang_turn.gang.roster.seats}
    least = min(steps.values())
    last = [node for node, step in steps.items() if step == least]
    return last[0] if len(last) == 1 < len(steps) else ""


def _slowest(gang_turn: GangTurn, node: str) -> int:
    ranks = ranks_of_generation(gang_turn.observed.status(node).ranks, gang_turn.gang.newest.generation)
    return min((rank.step if rank.progressed else -1 for rank in ranks), default=-1)


def _fence_after_stacks(gang_turn: GangTurn) -> bool:
    """Fence the generation once the stacks are written, or STACKS_TIMEOUT_S have passed. True: it was fenced."""
    hang = gang_turn.gang.findings.hang
    if hang is None or gang_turn.turn.limits.observe:
        return False
    until = max(hang.at, gang_turn.turn.observed.observing_since) + STACKS_TIMEOUT_S
    if gang_turn.index.stacks_missing and gang_turn.now < until:
        gang_turn.turn.tick_at(until)
        return False
    node, reason = hang.node, hang.reason
    if not node and (found := _rank_elsewhere(gang_turn) or _rank_behind(gang_turn)):
        node, reason = found[0], f"{reason}; {found[1]}"
    # Agents that miss each other: the network may hold the ranks up as well as the software.
    hardware = bool(gang_turn.index.accusers)
    failure_detector.fence_generation(gang_turn, reason, hardware, suspected_at=hang.suspected_at, crashed_on=node)
    return True


def _rank_elsewhere(gang_turn: GangTurn) -> tuple[str, str] | None:
    """The node of the only rank that did not wait for others when the stacks were written, and what it did in words.

    None: not every rank's stacks show where it was, or several ranks did not wait.
    """
    gang, ranks = gang_turn.gang, _ranks_with_nodes(gang_turn)
    elsewhere = [(node, rank) for node, rank in ranks if rank.hang_place is None or not rank.hang_place.waits]
    if len(ranks) != gang.ranks or len(elsewhere) != 1 or gang.ranks == 1:
        return None
    ((node, rank),) = elsewhere
    if rank.hang_place is None:
        return None
    return node, f"rank {rank.rank} on {node} was in {rank.hang_place.where} while all others waited for other ranks"


def _rank_behind(gang_turn: GangTurn) -> tuple[str, str] | None:
    """The node of the only rank that has entered fewer collectives than all others, and that in words.

    None: not every rank's count is known, or several ranks have the least.
    """
    gang, ranks = gang_turn.gang, _ranks_with_nodes(gang_turn)
    counts = sorted(
        (rank.entered_collectives, rank.rank, node) for node, rank in ranks if rank.entered_collectives is not None
    )
    if len(counts) != gang.ranks or gang.ranks == 1:
        return None
    (least, number, node), (next_least, *_) = counts[:2]
    if least == next_least:
        return None
    return node, f"rank {number} on {node} has entered {least} collectives, all others {next_least} or more"


def _ranks_with_nodes(gang_turn: GangTurn) -> list[tuple[str, RankState]]:
    """All ranks of the running generation, as far as their agents have reported them, with their nodes."""
    gang, observed = gang_turn.gang, gang_turn.observed
    return [
        (seat.node, rank)
        for seat in gang.roster.seats
        for rank in ranks_of_generation(observed.status(seat.node).ranks, gang.newest.generation)
    ]
