"""The hang detector: every agent answers, and no rank finishes a step.

A stall accuses no node. All agents are probed, and only if each of them answers and still no step comes does the
generation hang. Then its ranks' stacks are written, and it is fenced and restarted in place, as after a crash. The
timeout follows the gang's own pace. It is short if one rank alone sends no signs of life: no Python runs in that rank,
and the others wait for it. The hang then counts against that rank's node, as a crash there would. It also counts
against the node of a rank that is elsewhere, by its stacks, while all others wait for other ranks, and of a rank that
has entered fewer collectives than all others.

A declared phase (evaluation, saving) is never a stall. A script that has never declared a step, in no generation, may
not use the library. It is left alone, unless its job asks for more: then a generation stalls as well if all its ranks
have been idle for as long as the job allows. Idleness names no rank: those that wait are as idle as the one that hangs.

Stacks are written before the fence, not with it. On a faster node ranks would end while the stacks of others are
written, and those stacks would show the end of a connection.

A long call that nobody declared, and that keeps the GIL, costs one restart: no silence that ended by itself counts, and
after one failure in a place a silent rank shortens nothing there.
"""

from dataclasses import dataclass

from muster.daemon.coordinator.core.detection import fencing, probe_rounds, progress_timeouts
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec, RankState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Hang, NewestGeneration
from muster.daemon.coordinator.core.state.observed_state import AGENT, ObservedGang, Stall
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn

REPORT_DELAY_S = 1.0
"""Seconds after its answer within which an agent that stood still reports the steps made meanwhile."""
SILENT_RANK_S = 8
"""Seconds without a sign of life after which no Python runs in a rank. A sign comes each second, and few calls keep the
GIL for longer. The next shorter silence that agents report, 4 s, may be one of a busy machine."""
STACKS_TIMEOUT_S = 2.0
"""Seconds that the agents have to write the stacks before the fence."""


def detect_hang(gang_turn: GangTurn) -> bool:
    """Look for a stall, probe all agents in one, and end a generation that hangs. True: it was fenced."""
    gang, index, seen = gang_turn.gang, gang_turn.index, gang_turn.observed
    if gang.findings.hang is not None:
        return _fence_after_stacks(gang_turn, gang.findings.hang)
    if not _may_stall(gang, index, seen):
        seen.stall = None
        return False
    due = _due(gang_turn)
    if gang_turn.now < due:
        seen.stall = None
        gang_turn.turn.tick_at(due)
    elif seen.stall is None or not seen.stall.unanswered <= index.present:
        _probe_all(gang_turn)  # again if an agent to be waited for was removed: the other answers are old by then
    elif _all_have_answered(gang_turn, seen.stall):
        _record_hang(gang_turn)
    return False


def _may_stall(gang: Gang, index: GangIndex, seen: ObservedGang) -> bool:
    """All ranks run and declare steps, or are idle, and no rank has declared why there would be no step."""
    known = gang.plans.stop is None and (_declares_steps(gang.spec, gang.newest) or _idle_for_long(gang, index, seen))
    return known and not index.unattached and not index.in_declared_phase


def _declares_steps(spec: GangSpec, newest: NewestGeneration) -> bool:
    """The job wants hangs to be found by missing steps, and its script has declared a step."""
    return spec.hang_after_s > 0 and newest.stepped_generation > 0


def _idle_for_long(gang: Gang, index: GangIndex, seen: ObservedGang) -> bool:
    """The job limits for how long its ranks may be idle, and all of them have been idle for that long."""
    allowed = progress_timeouts.idle_timeout_quarters(gang.newest, gang.recovery, seen)
    return gang.spec.hang_after_idle_s > 0 and index.idle_quarters() >= allowed


def _due(gang_turn: GangTurn) -> float:
    """When the agents have to be asked (seconds)."""
    gang, index, seen = gang_turn.gang, gang_turn.index, gang_turn.observed
    if _idle_for_long(gang, index, seen):
        return gang_turn.now
    return progress_timeouts.last_progress_at(gang_turn) + _timeout_s(gang, index, seen)


def _timeout_s(gang: Gang, index: GangIndex, seen: ObservedGang) -> float:
    """Seconds that may pass until the next step.

    Once some ranks have exited with 0, the other ranks may have much work left without a step, or may wait for the
    ranks that have exited. Then the timeout is longer, and no silent rank shortens it.
    """
    timeout_s = progress_timeouts.hang_timeout_s(gang, seen)
    if index.exited_cleanly:
        known = seen.pace.median_step_s > 0  # else the timeout has this factor already
        return timeout_s * (progress_timeouts.UNKNOWN_PACE_FACTOR if known else 1)
    silent = _silent_rank(gang, index, seen)
    if silent is None:
        return timeout_s
    return min(timeout_s, progress_timeouts.silent_rank_timeout_s(gang, seen, silent.silent_s))


def _probe_all(gang_turn: GangTurn) -> None:
    """Probe every agent of the gang. Any other message of an agent counts as its answer, too."""
    present = gang_turn.index.present
    gang_turn.observed.stall = Stall(gang_turn.now, set(present))
    for node in sorted(present):
        member = gang_turn.gang.roster.members[node]
        probe_rounds.request(gang_turn, member, (AGENT,), "", probe_rounds.PROBE_TIMEOUT_S)
    gang_turn.turn.tick_at(gang_turn.now + probe_rounds.PROBE_TIMEOUT_S)


def _all_have_answered(gang_turn: GangTurn, stall: Stall) -> bool:
    """Every agent has answered, and had the time to report a step. A silent agent is suspected as any other."""
    # The last words of suspected nodes may be old, from a connection that was cut.
    asked_after = gang_turn.index.present & gang_turn.observed.suspected_since.keys()
    if stall.unanswered or asked_after:
        gang_turn.turn.tick_at(gang_turn.now + REPORT_DELAY_S)
        return False
    stall.answered_at = stall.answered_at or gang_turn.now
    if gang_turn.now < stall.answered_at + REPORT_DELAY_S:
        gang_turn.turn.tick_at(stall.answered_at + REPORT_DELAY_S)
        return False
    return True


def _record_hang(gang_turn: GangTurn) -> None:
    gang, index, seen = gang_turn.gang, gang_turn.index, gang_turn.observed
    since, silent = progress_timeouts.last_progress_at(gang_turn), _silent_rank(gang, index, seen)
    node = silent.node if silent is not None else _held_up_by(gang.roster, gang.newest, seen)
    words = f"hang: no rank has finished a step for {gang_turn.now - since:.0f} s, and every agent answers"
    if _idle_for_long(gang, index, seen):
        idle_s = index.idle_quarters() * gang.spec.hang_after_idle_s / 4
        since, node = max(gang.newest.started_at, gang_turn.now - idle_s), ""
        words = f"hang: all ranks have been idle for {idle_s:.0f} s or more, and every agent answers"
    elif silent is not None:
        words += f"; rank {silent.rank} on {node} has run no Python for {silent.silent_s} s or more, all others do"
    elif node:
        words += f"; the ranks on {node} are a step behind all others"
    if gang_turn.turn.limits.observe:
        words += "; observe mode: the ranks would be restarted in place"
    gang_turn.turn.record(facts.HangDetected(gang.id, gang.newest.generation, words, since, node))
    gang_turn.turn.tick_at(gang_turn.now + STACKS_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _SilentRank:
    """The only rank of the running generation that sends no signs of life. `silent_s`: for how long, rounded down."""

    node: str
    rank: int
    silent_s: int


def _silent_rank(gang: Gang, index: GangIndex, seen: ObservedGang) -> _SilentRank | None:
    """The rank that has been silent for long while every other rank of the gang sends signs of life; None: there is no
    such rank. If several are silent, a node or all of them may be short of processors."""
    if index.silent != 1 or index.signing != gang.ranks - 1 or gang.ranks == 1:
        return None
    (node,) = index.with_silent_rank
    ranks = seen.status(node).ranks_of(gang.newest.generation)
    rank, silent_s = next((rank.rank, rank.silent_s) for rank in ranks if rank.running and rank.silent_s)
    return _SilentRank(node, rank, silent_s) if silent_s >= SILENT_RANK_S else None


def _held_up_by(roster: Roster, newest: NewestGeneration, seen: ObservedGang) -> str:
    """The only node whose ranks are a step behind all others, and hold them up; empty if no single node is."""
    steps = {seat.node: _slowest(seen.status(seat.node).ranks_of(newest.generation)) for seat in roster.seats}
    least = min(steps.values())
    last = [node for node, step in steps.items() if step == least]
    return last[0] if len(last) == 1 < len(steps) else ""


def _slowest(ranks: list[RankState]) -> int:
    return min((rank.step if rank.progressed else -1 for rank in ranks), default=-1)


def _fence_after_stacks(gang_turn: GangTurn, hang: Hang) -> bool:
    """Fence the generation once the stacks are written, or STACKS_TIMEOUT_S have passed. True: it was fenced."""
    if gang_turn.turn.limits.observe:
        return False
    until = max(hang.at, gang_turn.turn.observed.observing_since) + STACKS_TIMEOUT_S
    if gang_turn.index.stacks_missing and gang_turn.now < until:
        gang_turn.turn.tick_at(until)
        return False
    node, reason = hang.node, hang.reason
    if not node and (found := _rank_apart(gang_turn.gang, gang_turn.observed)):
        node, reason = found[0], f"{reason}; {found[1]}"
    # Agents that miss each other: the network may hold the ranks up as well as the software.
    hardware = bool(gang_turn.index.accusers)
    fencing.fence_generation(gang_turn, reason, hardware, suspected_at=hang.suspected_at, crashed_on=node)
    return True


def _rank_apart(gang: Gang, seen: ObservedGang) -> tuple[str, str] | None:
    """The node of the only rank that the stacks, or else the counts of collectives, tell apart from all others, and how
    in words; None: there is none, or not every rank has reported."""
    ranks = [
        (seat.node, rank)
        for seat in gang.roster.seats
        for rank in seen.status(seat.node).ranks_of(gang.newest.generation)
    ]
    if len(ranks) != gang.ranks or gang.ranks == 1:
        return None
    return _rank_elsewhere(ranks) or _rank_behind(ranks)


def _rank_elsewhere(ranks: list[tuple[str, RankState]]) -> tuple[str, str] | None:
    """The node of the only rank that did not wait for others when the stacks were written, and what it did in words.

    None: not every rank's stacks show where it was, or several ranks did not wait.
    """
    elsewhere = [(node, rank) for node, rank in ranks if rank.hang_place is None or not rank.hang_place.waits]
    if len(elsewhere) != 1:
        return None
    ((node, rank),) = elsewhere
    if rank.hang_place is None:
        return None
    return node, f"rank {rank.rank} on {node} was in {rank.hang_place.where} while all others waited for other ranks"


def _rank_behind(ranks: list[tuple[str, RankState]]) -> tuple[str, str] | None:
    """The node of the only rank that has entered fewer collectives than all others, and that in words.

    None: not every rank's count is known, or several ranks have the least.
    """
    counts = sorted(
        (rank.entered_collectives, rank.rank, node) for node, rank in ranks if rank.entered_collectives is not None
    )
    if len(counts) != len(ranks):
        return None
    (least, number, node), (next_least, *_) = counts[:2]
    if least == next_least:
        return None
    return node, f"rank {number} on {node} has entered {least} collectives, all others {next_least} or more"
