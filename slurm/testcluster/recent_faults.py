"""Records which nodes Muster may drain now: nodes that had a fault recently.

Muster may detect a fault late: a coordinator was frozen, a standby took over, or the node was cut off and reported the
fault after its repair. So a node's record expires only after the node was healthy for `FAULT_EXPIRY_S` without
interruption: repaired, in service in Slurm, and FIT in Muster. If Muster drains the node after that, Muster has made an
error.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

FAULT_EXPIRY_S = 30.0
"""Seconds. A coordinator is frozen for at most 12 s. A standby serves after 9 s, and hears all nodes some seconds
later. Muster evicts a silent node after about 5 s.
"""


class RecentFaults:
    """The nodes that may be drained now. All times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._last_fault: dict[str, float] = {}  # the last time at which the node was not healthy

    def __contains__(self, node: str) -> bool:
        """Whether `node` may be drained."""
        return node in self._last_fault

    def record(self, node: str, now: float) -> None:
        """Records a fault of `node`."""
        self._last_fault[node] = now

    def expire(self, healthy: AbstractSet[str], now: float) -> list[str]:
        """Updates the records: the nodes `healthy` have no fault at `now`. Returns the nodes whose records have
        expired.
        """
        self._last_fault.update((node, now) for node in self._last_fault if node not in healthy)
        expired = [node for node, at in self._last_fault.items() if now - at >= FAULT_EXPIRY_S]
        for node in expired:
            del self._last_fault[node]
        return expired
