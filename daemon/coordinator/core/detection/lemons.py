"""Lemons: nodes that fail again and again.

In published field data, a few nodes have most of the failures (3 of 63 made up half of all exclusions). Muster counts
how often a node has failed within 30 days, and names it a lemon from a number of failures on that the site sets. An
operator decides what becomes of it: Muster drains no node for that.

A failure is a verdict that takes a node in service out of it. It does not count if somebody has asked for it, or if
only the agents of one job have reported it: the owner of a job can make agents report anything.
"""

from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import FAILURES_KEPT_S


def failures(state: DurableState, node: str, now: float) -> int:
    """How often the node has failed within 30 days."""
    return sum(now - at < FAILURES_KEPT_S for at in state.failed_at.get(node, ()))


def is_lemon(count: int, lemon_after: int) -> bool:
    """Whether so many failures make a lemon of a node, where the site's number is `lemon_after`; 0: never."""
    return 0 < lemon_after <= count
