"""Drains that operators request (`muster drain`): Slurm starts nothing more on the node, and ranks leave it.

A request says nothing about the health of the node, and does not count against the circuit breaker's limits. Gangs
leave the node by planned swaps, each as soon as it has a spare (`planned_swap`). A gang without a spare keeps its ranks
there: Slurm's own drain waits for running jobs, too. The request is over when Slurm has the node in service again.
"""

from muster.daemon.coordinator.core.detection.drain_reason import DrainReason, DrainSource
from muster.daemon.coordinator.core.recovery.planned_swap import drain_words
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import OUT_OF_SERVICE


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


def end_if_in_service(turn: Turn, seen: events.SlurmNodeChanged) -> None:
    """Slurm has a drained node in service again: an operator has resumed it."""
    if seen.in_service and turn.state.node(seen.node).drain is not None:
        turn.record(facts.NodeDrainEnded(seen.node, seen.text))


def end_if_refused(turn: Turn, owed: facts.SlurmCallOwed, error: str | None) -> None:
    """Slurm has answered the call for a drain that an operator requested."""
    if owed.requested_by and error and turn.state.node(owed.node).drain is not None:
        turn.record(facts.NodeDrainEnded(owed.node, f"Slurm refused: {error}"))
