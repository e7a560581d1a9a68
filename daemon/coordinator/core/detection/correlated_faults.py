"""Correlated faults: a hardware signal on one node that the loss of a peer explains, such as an NVLink error.

The core waits for the loss of a peer. Only if no peer is lost does the signal make its own node unfit. The node's
daemon has had its answer and does not repeat the signal, so the durable state holds the signal until it is decided.
"""

from muster.daemon.coordinator.core.detection.failure_detector import REATTACH_S
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import CorrelatedFault, DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.state_tables import MONITORED
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import UNRESPONSIVE

PEER_LOSS_AFTER_S = 2.5
"""Seconds after the signal within which the loss of a peer is detected, if that loss is the cause."""
PEER_LOSS_BEFORE_S = 5.0
"""Seconds before the signal within which a peer may have been found lost and still be the cause."""
LONGEST_WAIT_S = CAUSE_WAIT_S + 10.0
"""Seconds to wait, at most. While a peer is suspected, its loss may still show; if many nodes are silent at once, that
takes CAUSE_WAIT_S and more."""
RECHECK_S = 0.5
"""Seconds until the next look whether a peer is lost."""


def suspect(turn: Turn, node: str, reason: str) -> None:
    """Note a signal of a node in service, unless a lost peer explains it already, or a signal of this node is
    undecided."""
    if node not in turn.state.correlated_faults and not _lost_peer(turn, node, turn.now):
        turn.record(facts.CorrelatedFaultSuspected(node, reason))


def resolve_explained(turn: Turn) -> None:
    """Drop the signals that the loss of a peer explains."""
    for node, fault in sorted(turn.state.correlated_faults.items()):
        if peer := _lost_peer(turn, node, fault.at):
            turn.record(facts.CorrelatedFaultResolved(node, peer))


def resolve_unexplained(turn: Turn) -> list[tuple[str, str]]:
    """Decide the signals that have waited long enough without the loss of a peer.

    Returns: the nodes to call unfit, each with the reason.
    """
    resolve_explained(turn)
    left = sorted(turn.state.correlated_faults.items())
    over = [(node, fault.reason) for node, fault in left if turn.now >= _due_at(turn.observed, fault)]
    over = [(node, reason) for node, reason in over if not _peer_may_be_lost(turn, node)]
    for node, _ in over:
        turn.record(facts.CorrelatedFaultResolved(node))
    return over


def next_deadline(state: DurableState, observed: ObservedState, now: float) -> float | None:
    """When a signal may have to be decided (seconds); None if none is undecided."""
    dues = (_due_at(observed, fault) for fault in state.correlated_faults.values())
    return min((due if due > now else now + RECHECK_S for due in dues), default=None)


def _due_at(observed: ObservedState, fault: CorrelatedFault) -> float:
    """When the wait for a peer ends (seconds). A restarted coordinator first gives all agents the time to attach
    again."""
    return max(fault.at, observed.observing_since + REATTACH_S) + PEER_LOSS_AFTER_S


def _gangs_with(turn: Turn, node: str, at: float) -> list[Gang]:
    """The gangs that had `node` as a member at that time, or may have had."""
    gangs = turn.state.gangs.values()
    return [
        gang
        for gang in gangs
        if node in gang.roster.members and not (gang.final and gang.phase_at < at - PEER_LOSS_BEFORE_S)
    ]


def _lost_peer(turn: Turn, node: str, at: float) -> str:
    """A node of the same gang that was found lost or hung at that time or later; empty if there is none."""
    peers = {
        peer for gang in _gangs_with(turn, node, at) for peer in turn.index.out_of_service & gang.roster.members.keys()
    } - {node}
    found = (turn.state.node(peer) for peer in sorted(peers))
    dead = (n for n in found if n.health in UNRESPONSIVE and n.judged_at > at - PEER_LOSS_BEFORE_S)
    return next((n.name for n in dead), "")


def _peer_may_be_lost(turn: Turn, node: str) -> bool:
    """A peer is suspected, and LONGEST_WAIT_S have not passed."""
    fault = turn.state.correlated_faults[node]
    if turn.now >= _due_at(turn.observed, fault) - PEER_LOSS_AFTER_S + LONGEST_WAIT_S:
        return False
    watched = (gang for gang in _gangs_with(turn, node, fault.at) if gang.phase in MONITORED)
    return any(turn.observed.gang(gang.id).suspected_since.keys() - {node} for gang in watched)
