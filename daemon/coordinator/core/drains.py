"""Drains that operators request (`muster drain`): Slurm starts nothing more on the node, and ranks leave it.

A request says nothing about the health of the node, and does not count against the circuit breaker's limits. Gangs
leave the node by planned swaps, each as soon as it has a spare (`planned_swap`). A gang without a spare keeps its ranks
there: Slurm's own drain waits for running jobs, too. The request is over when Slurm has the node in service again.

State FAIL in Slurm is such a request: an administrator expects the node to fail. State DRAIN is none, because it lets
jobs end.

A DEGRADED node that no gang has is drained at once, if the policy's response is a swap: nobody has to leave it.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.detection.drain_reason import DrainReason, DrainSource
from muster.daemon.coordinator.core.recovery.planned_swap import drain_words
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import OUT_OF_SERVICE, NodeHealth


def begin(turn: Turn, request: events.DrainRequested) -> None:
    """Have Slurm drain the node. Nothing changes if it is drained already, or in observe mode."""
    if turn.limits.observe or drained_already(turn.state, request.node):
        return
    turn.record(facts.NodeDrainRequested(request.node, request.by, request.reason))
    text = str(DrainReason(f"{request.by}: {request.reason}", DrainSource.USER))
    turn.owe("drain", "", 0, text, node=request.node, requested_by=request.by)


def drained_already(state: DurableState, name: str) -> str:
    """Why the node needs no further drain, in words; empty if it does."""
    node = state.node(name)
    if node.drain is not None:
        return drain_words(name, node.drain)
    return f"{name} is {node.health}: {node.reason}" if node.health in OUT_OF_SERVICE else ""


def begin_if_it_fails(turn: Turn, seen: events.SlurmNodeChanged) -> None:
    """An administrator has set the node to FAIL in Slurm: ranks leave it."""
    if seen.drain is None or not seen.drain.fails or turn.limits.observe or drained_already(turn.state, seen.node):
        return
    why = f"state FAIL in Slurm{f', {seen.drain.reason}' if seen.drain.reason else ''}"
    turn.record(facts.NodeDrainRequested(seen.node, "an administrator", why))


def end_if_in_service(turn: Turn, seen: events.SlurmNodeChanged) -> None:
    """Slurm has a drained node in service again: an operator has resumed it."""
    if seen.in_service and turn.state.node(seen.node).drain is not None:
        turn.record(facts.NodeDrainEnded(seen.node, seen.text))


def end_if_refused(turn: Turn, owed: facts.SlurmCallOwed, error: str | None) -> None:
    """Slurm has answered the call for a drain that an operator requested."""
    if owed.requested_by and error and turn.state.node(owed.node).drain is not None:
        turn.record(facts.NodeDrainEnded(owed.node, f"Slurm refused: {error}"))


def drain_degraded_without_gang(turn: Turn) -> None:
    """Take the DEGRADED nodes out of service that no gang has, as far as the limits allow, by name.

    A gang leaves such a node by a planned swap. A gang without a spare keeps it, and so does a gang whose job holds the
    node and whose agent has not attached yet.
    """
    for node in sorted(turn.index.degraded):
        known = turn.state.node(node)
        if (
            known.response is Response.SWAP
            and not _is_held_by_gang(turn, node)
            and not circuit_breaker.reason_to_withhold(turn)
        ):
            circuit_breaker.take_out_of_service(turn, None, node, NodeHealth.UNFIT, known.reason)


def _is_held_by_gang(turn: Turn, node: str) -> bool:
    """The node is a member of a gang that is not over, or the job of such a gang has it."""
    live = (gang for gang in turn.state.gangs.values() if not gang.final)
    return any(node in gang.roster.members or node in gang.slurm.job_nodes for gang in live)
