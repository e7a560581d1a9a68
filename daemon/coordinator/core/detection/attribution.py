"""Attribution: which rank failed first and why, and whether crashes are the fault of a node or of the software.

Ranks that crash twice in a row on one node may be the fault of that node. A spare takes the node's place, once for each
group rank. If the ranks crash there too, it was the software. If they get further there, after two crashes on the old
node, it was the node. A hang is attributed to no node: an undeclared long pause looks the same, and passes elsewhere
because each hang in one place doubles the timeout.

Why a rank ended is in one line of what it has written last, and seldom in the last one. PyTorch's message of a CUDA
error goes on for five lines. After an uncaught exception its process group warns that nobody has destroyed it. A C++
exception is followed by its stack. Python draws a frame around the exceptions of a group, and libraries around the
mistakes of a command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import RankState
from muster.daemon.coordinator.core.state.generations import NewestGeneration, Recovery, RecoveryState
from muster.daemon.coordinator.core.state.observed_state import ObservedAgent, ObservedGang
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.turn.turn import GangTurn

CRASHES_UNTIL_SWAP = 2
"""Crashes in a row on one node, none further than the one before, after which a spare takes the node's place."""
EXIT_BY_SIGKILL = -9
"""Exit code of every fenced rank, and of a rank that the kernel killed for lack of memory."""
EXITS_WITHOUT_FAULT = frozenset({-6, EXIT_BY_SIGKILL, -15})
"""Exit codes by signals (SIGABRT, SIGKILL, SIGTERM) with which a rank ends itself over the loss of a peer, or is
ended."""
SAME_TIME_S = 1.0
"""Seconds within which the order of two exits proves nothing: a coordinator that a thousand agents attach to takes so
long to read what they say."""

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""PyTorch writes it before each line of an uncaught exception."""
_LIBRARY_LOG = re.compile(r"^(\[rank\d+\]:)?\[?[IW]\d{4} \d\d:\d\d:\d\d")
"""A line of glog's form at the level of information or of a warning."""
_FRAME = re.compile(r"^(Traceback \(most recent call last\):$|\s+File \"(?P<file>.*)\", line (?P<line>\d+)(?:, in |$))")
_NOT_PYTHON = ("SyntaxError: ", "IndentationError: ", "TabError: ")
"""Errors of which only the frame says where they are: no line of the script has run."""
_LEFT_SIDE, _RIGHT_SIDE = re.compile(r"^(\[rank\d+\]: ?)?\s*[|│] "), "│"
"""Of a drawn frame, after the prefix of the rank. Its other lines hold no word."""
_FATAL = re.compile(r"^(?:Fatal Python error: |\s*what\(\):\s+)(?P<words>.*)")
_LONG_MESSAGES = re.compile(r"CUDA|NCCL|cuDNN|HIP|Triton")
"""Errors of these libraries have messages of several lines, of which the first says what has happened."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """The end of a rank. `at`: when that was, on the coordinator's clock."""

    node: str
    rank: RankState
    at: float

    @property
    def failed(self) -> bool:
        """The rank has ended with an error."""
        return not self.rank.running and bool(self.rank.exit_code)

    @property
    def by_fault(self) -> bool:
        """A signal has ended the rank, and the cause is not the loss of a peer. SIGKILL counts, too."""
        return self.rank.exit_code == EXIT_BY_SIGKILL or self.by_fault_of_its_own

    @property
    def by_fault_of_its_own(self) -> bool:
        """A signal has ended the rank. The cause is neither the loss of a peer nor the rank's own agent, which sends
        SIGKILL."""
        return (self.rank.exit_code or 0) < 0 and self.rank.exit_code not in EXITS_WITHOUT_FAULT


def exit_of(agent: ObservedAgent, node: str, rank: RankState) -> RankExit:
    """The exit of `rank` on `node`. An agent of an earlier version does not say when it was."""
    return RankExit(node, rank, agent.reported_at - (rank.ended_s_ago or 0.0))


def may_have_failed_earlier_elsewhere(gang_turn: GangTurn, failed: Sequence[RankExit]) -> bool:
    """These ranks failed while nobody coordinated, or soon after, and an agent that may know of an earlier failure is
    about to attach again. A healthy rank dies of the reset of a peer's connection, and its agent may attach first."""
    late = gang_turn.index.unattached.intersection(seat.node for seat in gang_turn.gang.roster.seats)
    unseen = min(one.at for one in failed) < gang_turn.turn.observed.observing_since + SAME_TIME_S
    return unseen and not late <= gang_turn.observed.suspected_since.keys()


def first_to_fail(failed: Sequence[RankExit]) -> RankExit:
    """The exit that the others may follow from: the first one. Of those at the same time, one by a fault."""
    first = min(one.at for one in failed)
    return min(failed, key=lambda one: (one.at > first + SAME_TIME_S, not one.by_fault, one.at))


def find_crashed_node(last: Recovery, roster: Roster, newest: NewestGeneration, seen: ObservedGang) -> str:
    """The node on which ranks crashed and ended the newest generation; empty if no single node can be named.

    Called when all ranks have ended. The first reported exit proves little: a healthy rank dies of the reset of a
    peer's connection, and its agent may report first. `last`: the recovery from that end.
    """
    if last.hung or not last.crashed_on:
        return last.crashed_on
    exits = {seat.node: _exit_codes(seen.status(seat.node).ranks_of(newest.generation)) for seat in roster.seats}
    ended = {last.crashed_on, *(node for node, codes in exits.items() if codes - {0, EXIT_BY_SIGKILL})}
    if len(ended) == 1:
        return last.crashed_on
    faults = [node for node in ended if any(code < 0 for code in exits.get(node, set()) - EXITS_WITHOUT_FAULT)]
    return faults[0] if len(faults) == 1 else ""


def _exit_codes(ranks: Sequence[RankState]) -> set[int]:
    return {rank.exit_code for rank in ranks if rank.exit_code is not None}


def swap_crashing_node(gang_turn: GangTurn) -> None:
    """If ranks have crashed twice in a row on one node and a spare can take its place, remove the node."""
    if node := node_to_swap(gang_turn):
        words = f"ranks failed on {node} in two consecutive generations"
        gang_turn.turn.record(facts.MemberRemoved(gang_turn.gang.id, node, words, alive=True, attributed=False))


def node_to_swap(gang_turn: GangTurn) -> str:
    """The node on which ranks have crashed twice in a row, if a spare can take its place; else empty."""
    gang = gang_turn.gang
    node = _crashing_node(gang.recovery, gang.roster, gang.newest, gang_turn.observed)
    member, seat = gang.roster.members.get(node), next((seat for seat in gang.roster.seats if seat.node == node), None)
    if member is None or member.removed or seat is None or seat.group_rank in gang.recovery.group_ranks_swapped_once:
        return ""
    return node if len(gang_turn.usable()) > len(gang.roster.seats) else ""


def _crashing_node(recovery: RecoveryState, roster: Roster, newest: NewestGeneration, seen: ObservedGang) -> str:
    """The node on which ranks have crashed twice in a row, the second time no further than the first; else empty."""
    if len(recovery.recoveries) < 2:
        return ""
    *_, before, last = recovery.recoveries
    node = find_crashed_node(last, roster, newest, seen)
    if last.hardware or before.hardware or before.crashed_on != node:
        return ""
    # Fewer failures in a row: between the crashes the ranks got further, on that very node.
    return node if recovery.failures_in_a_row >= CRASHES_UNTIL_SWAP else ""


def attribute_to_node(gang_turn: GangTurn) -> None:
    """Take the removed node out of service if its ranks crashed there twice and get further elsewhere."""
    gang, node = gang_turn.gang, gang_turn.gang.recovery.unattributed_node
    if (
        not node
        or not _gets_further(gang.newest, gang.recovery, gang_turn.observed)
        or _came_back(gang.recovery, gang.roster)
    ):
        return
    reason = f"ranks failed on {node} in two consecutive generations, and the gang trains on without this node"
    if node not in gang_turn.turn.index.out_of_service:
        circuit_breaker.drain_if_run_has_node(gang_turn.turn, gang, gang.roster.members[node], reason)
    gang_turn.turn.record(facts.MemberRemoved(gang.id, node, reason, alive=gang.roster.members[node].alive))


def _gets_further(newest: NewestGeneration, recovery: RecoveryState, seen: ObservedGang) -> bool:
    """The running generation is further than any before. A finished step proves of other ranks only that they finished
    the step before."""
    generation, step = seen.last_step
    return newest.has_finished_step and generation == newest.generation and step > recovery.furthest_step + 1


def _came_back(recovery: RecoveryState, roster: Roster) -> bool:
    """The node has carried ranks again since its removal, as a node of the shared pool may. Then progress elsewhere
    proves nothing."""
    node = recovery.unattributed_node
    if any(seat.node == node for seat in roster.seats):
        return True
    for one in reversed(recovery.recoveries):
        if node in one.nodes_in:
            return True
        if node in one.nodes_out:
            return False
    return False


def cause_in(text: str) -> str:
    """The line that says why a rank ended, without the prefix that PyTorch gives it.

    Args:
        text: the last lines of what it has written, also cut in the middle of a line.

    Returns:
        "": there is no line.
    """
    written = [_LEFT_SIDE.sub(r"\1", line.rstrip().removesuffix(_RIGHT_SIDE).rstrip()) for line in text.splitlines()]
    written = [line for line in written if _RANK_PREFIX.sub("", line).strip()]
    lines = [line for line in written if re.search(r"\w", _RANK_PREFIX.sub("", line))] or written[-1:]
    lines = [line for line in lines if not _LIBRARY_LOG.match(line)] or lines[-1:]
    for number in range(len(lines) - 1, -1, -1):
        line = _RANK_PREFIX.sub("", lines[number])
        if fatal := _FATAL.match(line):
            return fatal["words"].strip()
        if _FRAME.match(line):
            return _of_traceback(lines[number], lines[number + 1 :])
    return _RANK_PREFIX.sub("", lines[-1]).strip() if lines else ""


def _of_traceback(frame: str, following: Sequence[str]) -> str:
    """The exception, unless the program wrote on after it: then it had been caught, and the last line says more."""
    uncaught = bool(_RANK_PREFIX.match(frame))
    lines = [_RANK_PREFIX.sub("", line) for line in following]
    error = next((number for number, line in enumerate(lines) if not line[0].isspace()), None)
    if error is None:
        return (lines or [frame])[-1].strip()
    goes_on = len(lines) > error + 1 and not lines[-1][0].isspace()
    if goes_on and not uncaught and not _LONG_MESSAGES.search(lines[error]):
        return lines[-1].strip()
    return _whole(frame, lines[error:])


def _whole(frame: str, lines: Sequence[str]) -> str:
    """The first line of an exception, with its second one if it ends with a colon, and with the place of an error that
    no traceback tells."""
    place = _FRAME.match(_RANK_PREFIX.sub("", frame))
    if lines[0].startswith(_NOT_PYTHON) and place and place["file"]:
        return f"{lines[0].strip()} ({place['file']}, line {place['line']})"
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
