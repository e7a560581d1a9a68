"""What follows from a signal of a node's hardware, as the policy says: UNFIT, a correlated fault, or a precursor.

A correlated fault is a signal that the loss of a peer explains, such as an NVLink error. The core waits for the loss of
a peer. Only if no peer is lost does the signal make its own node unfit. The node's daemon has had its answer and does
not repeat the signal, so the durable state holds the signal until it is decided.

A precursor announces a fault and makes its node DEGRADED, until the last precursor is over. The sensors report the end
of a condition that they can sample, for example that a GPU no longer throttles. Nobody can report the end of what a
line of the kernel log says: such a precursor holds until the node boots, or until an operator resumes the drained node
(`core._decide_on_node`).
"""

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.detection.failure_detector import REATTACH_S
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import CorrelatedFault, DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.state_tables import MONITORED
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import OUT_OF_SERVICE, UNRESPONSIVE, NodeHealth

PEER_LOSS_AFTER_S = 2.5
"""Seconds after the signal within which the loss of a peer is detected, if that loss is the cause."""
PEER_LOSS_BEFORE_S = 5.0
"""Seconds before the signal within which a peer may have been found lost and still be the cause."""
LONGEST_WAIT_S = CAUSE_WAIT_S + 10.0
"""Seconds to wait, at most. While a peer is suspected, its loss may still show; if many nodes are silent at once, that
takes CAUSE_WAIT_S and more."""
RECHECK_S = 0.5
"""Seconds until the next look whether a peer is lost."""
PRECURSORS_KEPT = 16
"""Number of a node's precursors that are told apart. Further ones count only if more follows from them."""


def decide(turn: Turn, event: events.NodeSignalled) -> None:
    """A node has reported a signal. Nothing follows if the node is out of service already."""
    if turn.state.node(event.node).health in OUT_OF_SERVICE:
        return
    if event.signal_action == "unfit":
        _call_unfit(turn, event.node, event.reason, event.program_error)
    elif event.signal_action == "unfit_unless_explained":
        _suspect_correlated_fault(turn, event)
    elif event.signal_action == "degraded":
        _begin_precursor(turn, event)
    elif event.signal_action == "over":
        _end_precursor(turn, event)


def _call_unfit(turn: Turn, node: str, reason: str, program_error: str) -> None:
    """Take the node out of service. If a limit forbids it, a FIT node is DEGRADED."""
    held = circuit_breaker.reason_to_withhold(turn)
    if not held:
        gang = next(iter(turn.index.gangs_of(node)), None)
        circuit_breaker.take_out_of_service(turn, gang, node, NodeHealth.UNFIT, reason, program_error=program_error)
    elif turn.state.node(node).health is NodeHealth.FIT:
        turn.record(facts.NodeJudged(node, NodeHealth.DEGRADED, f"{reason}; the node stays in service: {held}"))


def _suspect_correlated_fault(turn: Turn, event: events.NodeSignalled) -> None:
    """Note the signal, unless a lost peer explains it already, or a signal of this node is undecided."""
    if event.node not in turn.state.correlated_faults and not _lost_peer(turn, event.node, turn.now):
        turn.record(facts.CorrelatedFaultSuspected(event.node, event.reason, event.program_error))


def resolve_explained(turn: Turn) -> None:
    """Drop the signals that the loss of a peer explains."""
    for node, fault in sorted(turn.state.correlated_faults.items()):
        if peer := _lost_peer(turn, node, fault.at):
            turn.record(facts.CorrelatedFaultResolved(node, peer))


def resolve_unexplained(turn: Turn) -> None:
    """Decide the signals that have waited long enough without the loss of a peer: their nodes are unfit."""
    resolve_explained(turn)
    left = sorted(turn.state.correlated_faults.items())
    over = [(node, fault) for node, fault in left if turn.now >= _due_at(turn.observed, fault)]
    over = [(node, fault) for node, fault in over if not _peer_may_be_lost(turn, node)]
    for node, _ in over:
        turn.record(facts.CorrelatedFaultResolved(node))
    for node, fault in over:
        _call_unfit(turn, node, fault.reason, fault.program_error)


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


def _begin_precursor(turn: Turn, event: events.NodeSignalled) -> None:
    """A precursor was seen. A DEGRADED node is judged again only for another signal, or if more follows than before."""
    node = turn.state.node(event.node)
    known = node.precursors.get(event.signal)
    if known is None:
        is_news = len(node.precursors) < PRECURSORS_KEPT or event.response.strength > node.response.strength
    else:
        is_news = event.response.strength > known.response.strength
    if is_news:
        turn.record(
            facts.NodeJudged(event.node, NodeHealth.DEGRADED, event.reason, event.response, signal=event.signal)
        )


def _end_precursor(turn: Turn, event: events.NodeSignalled) -> None:
    """A signal is over. Without another precursor, the node is FIT again."""
    node = turn.state.node(event.node)
    if event.signal not in node.precursors:
        return
    turn.record(facts.PrecursorEnded(event.node, event.signal, event.reason))
    if not node.precursors:
        turn.record(facts.NodeJudged(event.node, NodeHealth.FIT, event.reason))
