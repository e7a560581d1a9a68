"""Precursors: signals that announce a fault make a node DEGRADED, until the last of them is over.

The sensors report the end of a condition that they can sample, for example that a GPU no longer throttles. Nobody can
report the end of what a line of the kernel log says: such a precursor holds until the node boots, or until an operator
resumes the drained node (`core._decide_on_node`).
"""

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import NodeHealth

PRECURSORS_KEPT = 16
"""Number of a node's precursors that are told apart. Further ones count only if more follows from them."""


def begin(turn: Turn, event: events.NodeSignalled) -> None:
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


def end(turn: Turn, event: events.NodeSignalled) -> None:
    """A signal is over. Without another precursor, the node is FIT again."""
    node = turn.state.node(event.node)
    if event.signal not in node.precursors:
        return
    turn.record(facts.PrecursorEnded(event.node, event.signal, event.reason))
    if not node.precursors:
        turn.record(facts.NodeJudged(event.node, NodeHealth.FIT, event.reason))
