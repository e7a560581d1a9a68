"""Seconds that a collective takes in a group of ranks with links of one kind. Pure.

Units: `ranks` is a number, `size` is bytes, α and β are those of the `Link` (seconds; bytes per second in each
direction). `size` is the whole buffer: for all-gather and reduce-scatter the buffer that is not divided, for
all-to-all all that one rank sends, its own share included. One rank alone pays nothing.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005) for
ring and all-to-all; Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009) for the double binary tree, which NCCL has used since 2.4; Graham and others, "Scalable Hierarchical
Aggregation Protocol" (2016) for the reduction within the switches.
"""

from __future__ import annotations

from muster.fabric.model.link import Link


def ring_pass(ranks: int, size: float, link: Link) -> float:
    """One turn of a ring, which is a reduce-scatter or an all-gather: (n−1)(α + B/(nβ))."""
    return (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def ring_all_reduce(ranks: int, size: float, link: Link) -> float:
    """Two turns of a ring: 2(n−1)(α + B/(nβ))."""
    return 2 * ring_pass(ranks, size, link)


def tree_all_reduce(ranks: int, size: float, link: Link) -> float:
    """Up and down a double binary tree: 2⌈log₂ n⌉α + 2B/β. The chunks of a buffer follow one another without a gap."""
    return 2 * (depth(ranks) * link.latency + size / link.bandwidth) if ranks > 1 else 0.0


def switch_all_reduce(ranks: int, size: float, link: Link) -> float:
    """The switches reduce (SHARP, NVLink SHARP): 2α + B/β. A rank sends its buffer once and receives the sum once."""
    return 2 * link.latency + size / link.bandwidth if ranks > 1 else 0.0


def broadcast(ranks: int, size: float, link: Link) -> float:
    """One rank to all through a switch, or along a chain in small chunks: α + B/β."""
    return link.time(size) if ranks > 1 else 0.0


def all_to_all(ranks: int, size: float, link: Link) -> float:
    """Each pair of ranks exchanges a part of 1/n: (n−1)(α + B/(nβ))."""
    return ring_pass(ranks, size, link)


def depth(ranks: int) -> int:
    """Edges from the root of a binary tree of so many ranks to its deepest leaf: ⌈log₂ n⌉."""
    return (ranks - 1).bit_length()
