"""Planned swaps: ranks leave a node at the end of a step, before the node fails, and no step is lost.

1. A node is DEGRADED, and the policy's response is a swap. `respond` records SwapPlanned if a spare is ready. Or a user
   asks for the swap (`requested_swap`): then nothing is held against the node.
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

from muster.daemon.coordinator.core.detection import circuit_breaker, failure_detector, progress_timeouts
from muster.daemon.coordinator.core.recovery import restore_plan
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Member, Straggler
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.gang_index import ranks_of_generation
from muster.daemon.coordinator.core.state.observed_state import stop_suspecting
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase, Response
from muster.daemon.coordinator.core.state.turn import GangTurn


def respond(gang_turn: GangTurn) -> None:
    """Plan a swap, or have the state written, if a node that carries ranks is DEGRADED and the policy asks for it."""
    degraded = _degraded_seats(gang_turn)
    if not degraded or not may_plan(gang_turn):
        return
    if leaving := _leaving(gang_turn):
        gang = gang_turn.gang
        gang_turn.turn.record(facts.SwapPlanned(gang.id, leaving[0], gang.generation, _reason(gang_turn, leaving[0])))
        return
    for node in degraded:
        if node not in gang_turn.observed.flushed_for:
            gang_turn.observed.flushed_for.add(node)
            gang_turn.observed.flush_requested_by = f"the policy, because {node} is DEGRADED"


def may_plan(gang_turn: GangTurn) -> bool:
    """The generation trains, nothing else ends it, and its newest step can be kept in memory."""
    gang = gang_turn.gang
    if gang.phase is not Phase.RUNNING or gang.swap is not None or gang.stop is not None or gang.hang is not None:
        return False
    if not progress_timeouts.has_finished_step(gang_turn):
        return False
    version = restore_plan.newest_complete_version(gang_turn.shards_in_memory(), gang.ranks_of)
    return version is not None and version.generation == gang.generation


def leave_nodes(gang_turn: GangTurn) -> bool:
    """No rank runs: take out the nodes that shall be left, as far as spares suffice. True: a node was taken out."""
    leaving, unrequested = _leaving(gang_turn), _degraded_to_leave(gang_turn)
    for node in leaving:
        if node not in unrequested:
            _leave_as_requested(gang_turn, node)
            continue
        reason = _reason(gang_turn, node)
        if not _has_precursor(gang_turn, node):  # only ranks have reported about it: its health stays as it is
            failure_detector.remove_member(gang_turn, gang_turn.gang.members[node], reason, alive=True)
            continue
        circuit_breaker.take_out_of_service(gang_turn.turn, gang_turn.gang, node, NodeHealth.UNFIT, reason)
    return bool(leaving)


def have_ranks_stopped(gang_turn: GangTurn) -> bool:
    """Every rank has exited with 0; or has finished its last step, and that step is committed."""
    index, generation = gang_turn.index, gang_turn.gang.generation
    if index.stopped < index.reported or index.exited_cleanly == index.reported:
        return index.exited_cleanly == index.reported
    statuses = [gang_turn.observed.status(seat.node) for seat in gang_turn.gang.seats]
    last = max(rank.stopped_step for status in statuses for rank in ranks_of_generation(status.ranks, generation))
    return any(status.committed == Version(generation, last) for status in statuses)


def _leave_as_requested(gang_turn: GangTurn, node: str) -> None:
    """Remove the node from the gang. Its health stays, and Slurm does not drain it."""
    gang, swap = gang_turn.gang, gang_turn.gang.swap
    assert swap is not None
    if gang.phase is Phase.RUNNING:
        failure_detector.fence_generation(
            gang_turn, swap.reason, hardware=True, suspected_at=gang_turn.now, not_on=node
        )
    gang_turn.turn.record(facts.MemberRemoved(gang.id, node, swap.reason, alive=True, requested=True))
    stop_suspecting(gang_turn.observed, node)


def fence_stopped(gang_turn: GangTurn) -> None:
    """Every rank has stopped for a planned swap. Nodes were left, which fences the generation; or no node can be left
    any more, and the ranks start again where they were."""
    swap = gang_turn.gang.swap
    assert swap is not None
    if not leave_nodes(gang_turn):
        words = f"{swap.reason}; {swap.node} keeps its ranks, because no spare is left"
        failure_detector.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)


def _degraded_seats(gang_turn: GangTurn) -> list[str]:
    """The nodes that carry ranks, and are DEGRADED or have a straggler that lasts, if something follows from that; by
    name."""
    gang, seats = gang_turn.gang, gang_turn.index.seats
    nodes = {*gang_turn.turn.index.degraded, *(straggler.node for straggler in gang.stragglers)}
    carrying = (node for node in nodes if node in seats and seats[node].group_rank >= 0)
    present = (node for node in carrying if not gang.members[node].removed)
    return sorted(node for node in present if _response(gang_turn, node) is not Response.RECORD)


def _has_precursor(gang_turn: GangTurn, node: str) -> bool:
    """The node's own hardware has announced a fault, and a swap follows from that."""
    known = gang_turn.turn.state.node(node)
    return known.health is NodeHealth.DEGRADED and known.response is Response.SWAP


def _response(gang_turn: GangTurn, node: str) -> Response:
    """What follows from the health of a node, and from a straggler on it: the stronger of the two."""
    known, straggler = gang_turn.turn.state.node(node), _straggler_on(gang_turn, node)
    of_health = known.response if known.health is NodeHealth.DEGRADED else Response.RECORD
    of_straggler = (straggler.response if straggler is not None else None) or Response.RECORD
    return max(of_health, of_straggler, key=lambda response: response.strength)


def _reason(gang_turn: GangTurn, node: str) -> str:
    """Why the node is left."""
    straggler = None if _has_precursor(gang_turn, node) else _straggler_on(gang_turn, node)
    return straggler.reason if straggler is not None else gang_turn.turn.state.node(node).reason


def _straggler_on(gang_turn: GangTurn, node: str) -> Straggler | None:
    """The straggler on the node that has lasted in the running generation, and from which most follows."""
    gang = gang_turn.gang
    mine = (known for known in gang.stragglers if (known.node, known.generation) == (node, gang.generation))
    lasting = [straggler for straggler in mine if straggler.response is not None]
    return max(lasting, key=lambda known: (known.response or Response.RECORD).strength, default=None)


def _leaving(gang_turn: GangTurn) -> list[str]:
    """The nodes that can be left now: a spare is ready for each, and no limit forbids it."""
    degraded = _degraded_to_leave(gang_turn)
    wanted = [*(node for node in _requested(gang_turn) if node not in degraded), *degraded]
    return wanted[: max(0, free_spares(gang_turn))] if wanted else []


def _requested(gang_turn: GangTurn) -> list[str]:
    """The nodes with ranks that users want to be left."""
    swap, usable = gang_turn.gang.swap, {member.node for member in gang_turn.usable()}
    return [swap.node] if swap is not None and swap.requested_by and swap.node in usable else []


def _degraded_to_leave(gang_turn: GangTurn) -> list[str]:
    """The DEGRADED nodes that the policy wants to be left, as far as the limits allow."""
    wanted = [name for name in _degraded_seats(gang_turn) if _response(gang_turn, name) is Response.SWAP]
    if not wanted or circuit_breaker.reason_to_withhold(gang_turn.turn):
        return []
    return wanted[: max(0, circuit_breaker.swaps_left(gang_turn))]


def free_spares(gang_turn: GangTurn) -> int:
    """How many ready spares there are, besides those that empty seats need; negative: too few for the empty seats."""
    usable = {member.node for member in gang_turn.usable()}
    empty = sum(seat.node not in usable for seat in gang_turn.gang.seats)
    return len(_ready_spares(gang_turn)) - empty


def _ready_spares(gang_turn: GangTurn) -> list[Member]:
    """Members without ranks that can take a seat at once: in touch, not suspected, and with no precursor."""
    seated, seen = {seat.node for seat in gang_turn.gang.seats}, gang_turn.observed
    return [
        member
        for member in gang_turn.usable()
        if member.node not in seated
        and gang_turn.turn.state.node(member.node).health is NodeHealth.FIT
        and seen.is_attached(member.node)
        and member.node not in seen.suspected_since
        and not seen.status(member.node).failure
    ]
