"""Signals that may be the echo of a peer's loss, such as an NVLink error: that loss is waited for, and only where none
shows is it the node's own.

The node's daemon has been answered, and says it no more: so the signal stands in the durable state until it is decided.
"""

from muster.daemon.coordinator.core.detection.failure_detector import REATTACH_S
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import CorrelatedFault, DurableState, Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.state_tables import MONITORED, UNRESPONSIVE
from muster.daemon.coordinator.core.state.turn import Turn

PEER_LOSS_AFTER_S = 2.5
"""A peer whose loss has such an echo is missed within this."""
PEER_LOSS_BEFORE_S = 5.0
"""A peer that was found lost so shortly before has such an echo."""
LONGEST_WAIT_S = CAUSE_WAIT_S + 10.0
"""While a peer is asked after its loss may still show; where many are silent at once that takes a minute and more."""
RECHECK_S = 0.5
"""So often it is looked whether it has."""


def suspect(turn: Turn, node: str, reason: str) -> None:
    """Such a signal has come from a node in service. One that is waited for already makes no difference."""
    if node not in turn.state.correlated_faults and not _lost_peer(turn, node, turn.now):
        turn.record(facts.CorrelatedFaultSuspected(node, reason))


def resolve_explained(turn: Turn) -> None:
    """Drop the signals that a peer's loss explains."""
    for node, echo in sorted(turn.state.correlated_faults.items()):
        if peer := _lost_peer(turn, node, echo.at):
            turn.record(facts.CorrelatedFaultResolved(node, peer))


def resolve_unexplained(turn: Turn) -> list[tuple[str, str]]:
    """Nodes whose signal has waited long enough for a peer's loss, which has not come, and why it is fatal."""
    resolve_explained(turn)
    left = sorted(turn.state.correlated_faults.items())
    over = [(node, echo.reason) for node, echo in left if turn.now >= _due_at(turn.observed, echo)]
    over = [(node, reason) for node, reason in over if not _may_show(turn, node)]
    for node, _ in over:
        turn.record(facts.CorrelatedFaultResolved(node))
    return over


def next_deadline(state: DurableState, observed: ObservedState, now: float) -> float | None:
    """When one of them may have to be decided."""
    dues = (_due_at(observed, echo) for echo in state.correlated_faults.values())
    return min((due if due > now else now + RECHECK_S for due in dues), default=None)


def _due_at(observed: ObservedState, echo: CorrelatedFault) -> float:
    """Whom a restarted coordinator has to miss can't be told before agents have had the time to attach anew."""
    return max(echo.at, observed.observing_since + REATTACH_S) + PEER_LOSS_AFTER_S


def _homes(turn: Turn, node: str, at: float) -> list[Gang]:
    """The gangs that had `node` as a member at that time, or may have had."""
    gangs = turn.state.gangs.values()
    return [
        gang for gang in gangs if node in gang.members and not (gang.final and gang.phase_at < at - PEER_LOSS_BEFORE_S)
    ]


def _lost_peer(turn: Turn, node: str, at: float) -> str:
    """A node of the same gang that was found dead at that time or later; empty: there is none."""
    peers = {peer for gang in _homes(turn, node, at) for peer in turn.index.out_of_service & gang.members.keys()} - {
        node
    }
    found = (turn.state.node(peer) for peer in sorted(peers))
    dead = (n for n in found if n.health in UNRESPONSIVE and n.judged_at > at - PEER_LOSS_BEFORE_S)
    return next((n.name for n in dead), "")


def _may_show(turn: Turn, node: str) -> bool:
    """A peer is asked after, and not for too long."""
    echo = turn.state.correlated_faults[node]
    if turn.now >= _due_at(turn.observed, echo) - PEER_LOSS_AFTER_S + LONGEST_WAIT_S:
        return False
    watched = (gang for gang in _homes(turn, node, echo.at) if gang.phase in MONITORED)
    return any(turn.observed.gang(gang.id).suspected_since.keys() - {node} for gang in watched)
