"""Planned swaps: ranks leave a node at the end of a step, before the node fails, and no step is lost.

1. A node is DEGRADED, and the policy's response is a swap; or an operator drains the node. `respond` records
   SwapPlanned if a spare is ready. Or a user requests the swap (`requested_swap`). A request is not held against the
   node.
2. Orders ask the ranks to finish a step, to keep it in memory and to exit, as for a planned stop.
3. All ranks have stopped: they have exited, or the gang has committed the step that is their last one. What a process
   does after that step is part of no checkpoint, so the gang waits for no exit: eight Python processes with PyTorch
   need two seconds for it. `leave_nodes` takes the node out, and the recovery goes on as after any fault: the ranks are
   killed, the spare takes the seat, and the next generation starts from that step.

A straggler that lasts is left in the same way, if the policy asks for it. Only ranks have reported about its node, so
the node keeps its health: it leaves the gang, and Slurm drains nothing.

If the generation ends by another fault meanwhile, that recovery leaves the node, too. If the spare is gone when the
ranks have stopped, they are started again where they were: a node that still works is worth more than none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from muster.daemon.coordinator.core.detection import circuit_breaker, fencing
from muster.daemon.coordinator.core.recovery import restore_plan
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DrainRequest, Node
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.generations import Straggler
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase, Response
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.node_health import NodeHealth


class _Cause(Enum):
    """Why a node with ranks is to be left."""

    PRECURSOR = auto()  # its hardware has announced a fault: it is taken out of service
    STRAGGLER = auto()  # its ranks make the others wait
    REQUEST = auto()  # a user wants it, or it gives way to another one: nothing is held against the node


@dataclass(frozen=True, slots=True)
class _Concern:
    """Something about a node that carries ranks, and what follows. `requested_by`: the user who wants it left."""

    node: str
    cause: _Cause
    reason: str
    response: Response
    requested_by: str = ""


def respond(gang_turn: GangTurn) -> None:
    """A node that carries ranks is DEGRADED or drained: plan a swap. Without a spare, request one of the pool, and have
    the state written."""
    gang, concerns = gang_turn.gang, [*_drained(gang_turn), *_degraded(gang_turn)]
    if not concerns or not may_plan(gang_turn):
        return
    if leaving := _leaving(gang_turn):
        first = leaving[0]
        gang_turn.turn.record(
            facts.SwapPlanned(gang.id, first.node, gang.newest.generation, first.reason, first.requested_by)
        )
        return
    if waits_for_spare(gang_turn):
        shared_pool.request_beforehand(gang_turn)
    for node in (concern.node for concern in concerns if concern.cause is not _Cause.REQUEST):
        if node not in gang_turn.observed.flushed_for:
            gang_turn.observed.flushed_for.add(node)
            gang_turn.observed.flush_requested_by = f"the policy, because {node} is DEGRADED"


def may_plan(gang_turn: GangTurn) -> bool:
    """The generation trains, nothing else ends it, and its newest step can be kept in memory."""
    gang = gang_turn.gang
    if not gang.trains_undisturbed or not gang.newest.has_finished_step:
        return False
    version = restore_plan.newest_restorable(gang_turn, gang.ranks_of)
    return version is not None and version.generation == gang.newest.generation


def waits_for_spare(gang_turn: GangTurn) -> bool:
    """A node shall be left while the gang trains, no limit forbids it, and no spare is ready."""
    gang = gang_turn.gang
    if gang.phase is not Phase.RUNNING or not gang.plans.are_none:
        return False
    wanted = bool(_drained(gang_turn) or _degraded_to_leave(gang_turn))
    return wanted and free_spares(gang_turn) <= 0


def leave_nodes(gang_turn: GangTurn) -> bool:
    """No rank runs: take out the nodes that shall be left, as far as spares suffice. True: a node was taken out."""
    leaving = _leaving(gang_turn)
    for concern in leaving:
        if concern.cause is _Cause.PRECURSOR:
            circuit_breaker.take_out_of_service(
                gang_turn.turn, gang_turn.gang, concern.node, NodeHealth.UNFIT, concern.reason
            )
            continue
        fencing.remove_member(
            gang_turn,
            gang_turn.gang.roster.members[concern.node],
            concern.reason,
            alive=True,
            requested=concern.cause is _Cause.REQUEST,
        )
    return bool(leaving)


def have_ranks_stopped(index: GangIndex, seen: ObservedGang, generation: int) -> bool:
    """Every rank has exited with 0; or has finished its last step, and that step is committed."""
    if index.stopped < index.reported or index.exited_cleanly == index.reported:
        return index.exited_cleanly == index.reported
    statuses = [seen.status(node) for node, seat in index.seats.items() if seat.group_rank >= 0]
    last = max(rank.stopped_step for status in statuses for rank in status.ranks_of(generation))
    return any(status.committed == Version(generation, last) for status in statuses)


def fence_stopped(gang_turn: GangTurn) -> None:
    """Every rank has stopped for a planned swap. Nodes were left, which fences the generation; or no node can be left
    any more, and the ranks start again where they were."""
    swap = gang_turn.gang.plans.swap
    assert swap is not None
    if not leave_nodes(gang_turn):
        words = f"{swap.reason}; {swap.node} keeps its ranks, because {_why_kept(gang_turn, swap.node)}"
        fencing.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)


def _why_kept(gang_turn: GangTurn, node: str) -> str:
    """Why a node is not left although a swap was planned, in words."""
    if free_spares(gang_turn) <= 0:
        return "no spare is left"
    wanted = any(one.node == node and one.response is Response.SWAP for one in _degraded(gang_turn))
    return "a limit protects it" if wanted else "what was reported of it is over"


def drain_words(node: str, drain: DrainRequest) -> str:
    """Who drains the node, and why."""
    return f"{drain.requested_by} drains {node}" + (f": {drain.reason}" if drain.reason else "")


def _leaving(gang_turn: GangTurn) -> list[_Concern]:
    """The nodes that can be left now: a spare is ready for each, and no limit forbids it."""
    degraded = _degraded_to_leave(gang_turn)
    names = {concern.node for concern in degraded}
    wanted = [*(concern for concern in _requested(gang_turn) if concern.node not in names), *degraded]
    return wanted[: max(0, free_spares(gang_turn))] if wanted else []


def _requested(gang_turn: GangTurn) -> list[_Concern]:
    """The nodes with ranks that are left without a fault: the swap that was planned on request, or because a node gives
    way; then drained nodes."""
    swap, usable = gang_turn.gang.plans.swap, {member.node for member in gang_turn.usable()}
    drained = _drained(gang_turn)
    if swap is None or not (swap.requested_by or swap.gives_way_to) or swap.node not in usable:
        return drained
    if swap.gives_way_to and swap.gives_way_to not in ready_spares(gang_turn):
        return drained
    first = _Concern(swap.node, _Cause.REQUEST, swap.reason, Response.SWAP, swap.requested_by)
    return [first, *(concern for concern in drained if concern.node != swap.node)]


def _drained(gang_turn: GangTurn) -> list[_Concern]:
    """The nodes with ranks that an operator drains, by name."""
    if gang_turn.turn.limits.observe:
        return []
    concerns = []
    for node in _carrying(gang_turn.index, gang_turn.turn.index.drained - gang_turn.turn.index.out_of_service):
        if (drain := gang_turn.turn.state.node(node).drain) is not None:
            words = drain_words(node, drain)
            concerns.append(_Concern(node, _Cause.REQUEST, words, Response.SWAP, drain.requested_by))
    return concerns


def _degraded_to_leave(gang_turn: GangTurn) -> list[_Concern]:
    """The DEGRADED nodes that the policy wants to be left, as far as the limits allow."""
    wanted = [concern for concern in _degraded(gang_turn) if concern.response is Response.SWAP]
    if not wanted or circuit_breaker.reason_to_withhold(gang_turn.turn):
        return []
    return wanted[: max(0, circuit_breaker.swaps_left(gang_turn.turn, gang_turn.gang.recovery))]


def _degraded(gang_turn: GangTurn) -> list[_Concern]:
    """The nodes that carry ranks, and are DEGRADED or have a straggler that lasts, if something follows from that; by
    name."""
    gang, state = gang_turn.gang, gang_turn.turn.state
    stragglers = [one for one in gang.findings.stragglers if one.generation == gang.newest.generation]
    nodes = gang_turn.turn.index.degraded | {straggler.node for straggler in stragglers}
    concerns = [_strongest_concern(state.node(node), stragglers) for node in _carrying(gang_turn.index, nodes)]
    return [concern for concern in concerns if concern.response is not Response.RECORD]


def _carrying(index: GangIndex, nodes: set[str]) -> list[str]:
    """Those of `nodes` that carry ranks, by name."""
    return sorted(node for node in nodes & index.present if node in index.seats and index.seats[node].group_rank >= 0)


def _strongest_concern(node: Node, stragglers: Sequence[Straggler]) -> _Concern:
    """What follows from the health of a node, or from one of the `stragglers` that have lasted. Of equal ones, that of
    the health."""
    of_health = node.response if node.health is NodeHealth.DEGRADED else Response.RECORD
    mine = (straggler for straggler in stragglers if straggler.node == node.name)
    straggler = max(mine, key=lambda straggler: _response(straggler).strength, default=None)
    if straggler is not None and _response(straggler).strength > of_health.strength:
        return _Concern(node.name, _Cause.STRAGGLER, straggler.reason, _response(straggler))
    return _Concern(node.name, _Cause.PRECURSOR, node.reason, of_health)


def _response(straggler: Straggler) -> Response:
    return straggler.response or Response.RECORD


def free_spares(gang_turn: GangTurn) -> int:
    """How many ready spares there are, besides those that empty seats need; negative: too few for the empty seats."""
    usable = {member.node for member in gang_turn.usable()}
    empty = sum(node not in usable for node in gang_turn.gang.seats_to_fill())
    return len(ready_spares(gang_turn)) - empty


def ready_spares(gang_turn: GangTurn) -> list[str]:
    """Nodes without ranks that can take a seat at once: in touch, not suspected, not drained, and with no
    precursor."""
    seated, seen = {seat.node for seat in gang_turn.gang.roster.seats}, gang_turn.observed
    return [
        member.node
        for member in gang_turn.usable()
        if member.node not in seated
        and gang_turn.turn.state.node(member.node).health is NodeHealth.FIT
        and member.node not in gang_turn.turn.index.unwanted
        and seen.is_attached(member.node)
        and member.node not in seen.suspected_since
        and not seen.status(member.node).failure
    ]
