"""The bandwidth between two halves of a fabric, and what crosses it. Pure.

Source: Leiserson, "Fat-Trees" (1985); Dally and Towles, "Principles and Practices of Interconnection Networks"
(2004), 3.2.
"""

from __future__ import annotations


def bisection_bandwidth(nodes: int, bandwidth: float, oversubscription: float = 1.0) -> float:
    """Bandwidth between two halves: N/2 · b, divided by the oversubscription. In the unit of `bandwidth`.

    Args:
        nodes: nodes of the fabric.
        bandwidth: what one node can send.
        oversubscription: 1 for full bisection, 4 for a 4:1 fabric.
    """
    return nodes / 2 * bandwidth / oversubscription


def all_to_all_crossing(ranks: int, size: float) -> float:
    """Bytes that an all-to-all of `size` bytes a rank sends across, one way: half of the ranks send half: n·B/4."""
    return ranks * size / 4


def ring_crossing(ranks: int, size: float) -> float:
    """Bytes that a ring all-reduce sends across, one way: one edge of the ring, 2(n−1)/n · B."""
    return 2 * (ranks - 1) / ranks * size
