"""Doubt: ranks fail twice running on one node, and it is not known whether that is the node's fault or the software's.

A spare takes the node's place, once for each place in the gang. If the ranks crash there too, it was no node's fault;
if they come further, and it had crashed them twice, it is to blame. A hang blames nobody: what is taken for one may be
a pause that only lasts, and that passes elsewhere because each hang in one place doubles the wait.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.detection.progress_timeouts import stepped
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.events import RankState
from muster.daemon.coordinator.core.state.gang_index import of_generation
from muster.daemon.coordinator.core.state.state_tables import Verdict
from muster.daemon.coordinator.core.state.turn import GangTurn

DOUBTED_AFTER = 2
"""So many crashes running on one node, each no further than the one before, are as likely the node's fault."""
KILLED = -9
"""Every rank that is fenced ends so, and whom the kernel ended for want of memory."""
OFTEN_NO_FAULT = frozenset({-6, KILLED, -15})
"""Signals by which a rank ends itself over a peer's loss, or is ended by others."""


def crashed_on(gang_turn: GangTurn) -> str:
    """The node on which ranks ended the newest generation by themselves, now that all ranks have ended; empty where no
    single one can be named. Whose exit was reported first says little: a healthy rank dies of its peer's reset, and its
    agent may be the quicker one."""
    gang = gang_turn.gang
    last = gang.recoveries[-1]
    if last.hung or not last.crashed_on:
        return last.crashed_on
    exits = {seat.node: _exits(gang_turn, seat.node) for seat in gang.seats}
    ended = {last.crashed_on, *(node for node, codes in exits.items() if codes - {0, KILLED})}
    if len(ended) == 1:
        return last.crashed_on
    faults = [node for node in ended if any(code < 0 for code in exits.get(node, set()) - OFTEN_NO_FAULT)]
    return faults[0] if len(faults) == 1 else ""


def _exits(gang_turn: GangTurn, node: str) -> set[int]:
    ranks: list[RankState] = of_generation(gang_turn.seen.status(node).ranks, gang_turn.gang.generation)
    return {rank.exit_code for rank in ranks if rank.exit_code is not None}


def examine(gang_turn: GangTurn) -> None:
    """Where ranks have failed on one node twice running, another node takes its place, if there is one."""
    gang = gang_turn.gang
    if len(gang.recoveries) < 2:
        return
    *_, before, last = gang.recoveries
    node = crashed_on(gang_turn)
    if last.hardware or before.hardware or not node or before.crashed_on != node:
        return
    if gang.failures < DOUBTED_AFTER:
        return  # the ranks had come further in between, on that very node
    member, seat = gang.members.get(node), next((seat for seat in gang.seats if seat.node == node), None)
    if member is None or member.out or seat is None or seat.group_rank in gang.doubts:
        return
    if len(gang_turn.usable()) > len(gang.seats):
        gang_turn.turn.record(
            facts.MemberOut(gang.id, node, f"ranks failed on {node} twice running", alive=True, proven=False)
        )


def blame(gang_turn: GangTurn) -> None:
    """The ranks crashed on one node twice, and have come further without it."""
    gang, node = gang_turn.gang, gang_turn.gang.doubted
    if not node or not stepped(gang_turn) or gang_turn.seen.moved_to[0] != gang.generation or _came_back(gang):
        return
    if gang_turn.seen.moved_to[1] <= gang.reached + 1:
        return  # a rank that has finished a step says of the others that they have finished the one before
    reason = f"ranks failed on {node} twice running, and go on elsewhere"
    if node not in gang_turn.turn.index.out:
        circuit_breaker.take(gang_turn.turn, gang, node, Verdict.UNFIT, reason)
    gang_turn.turn.record(facts.MemberOut(gang.id, node, reason, alive=gang.members[node].alive))


def _came_back(gang: Gang) -> bool:
    """The doubted node has carried ranks again since, as one of the shared pool may: where they go on tells nothing."""
    if any(seat.node == gang.doubted for seat in gang.seats):
        return True
    for recovery in reversed(gang.recoveries):
        if gang.doubted in recovery.nodes_in:
            return True
        if gang.doubted in recovery.nodes_out:
            return False
    return False
