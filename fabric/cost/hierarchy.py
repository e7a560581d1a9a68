"""Seconds that a collective takes in a group whose ranks stand in domains: GPUs in a node, nodes under a leaf. Pure.

A group is a tuple of tiers, the innermost first: `(Tier(8, nvlink), Tier(4, nic, rails=8))` is 4 nodes with 8 ranks
each. The number of ranks is the product of the tiers' sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.fabric.cost import collectives
from muster.fabric.model.link import Link

TREE_SHARE = 0.92
"""Share of a link's bandwidth that NCCL expects of a tree (src/graph/tuning.cc)."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One step outwards: `size` domains of the tier below, joined by links of one kind.

    Raises:
        ValueError: the size is less than 1, or the rails carry nothing.
    """

    size: int
    link: Link
    rails: float = 1.0
    """Links that each of the joined domains has for this group. Eight GPUs with a NIC each: 8 for a group that has all
    eight GPUs, 1 for a group that has one of them. One NIC for eight groups: 1/8.
    """

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rails > 0:
            raise ValueError(f"a tier needs a size of 1 or more and rails above 0, not {self.size} and {self.rails:g}")

    @property
    def joined(self) -> Link:
        """All rails of one domain as one link."""
        return Link(self.link.latency, self.link.bandwidth * self.rails)


Tiers = tuple[Tier, ...]


def ranks_of(tiers: Sequence[Tier]) -> int:
    """The number of ranks of a group."""
    return math.prod(tier.size for tier in tiers)


def without_empty(tiers: Sequence[Tier]) -> Tiers:
    """The tiers in which something is joined."""
    return tuple(tier for tier in tiers if tier.size > 1)


def slowest(tiers: Sequence[Tier]) -> Link:
    """The link of a ring or tree over all ranks: the longest latency and the smallest bandwidth on its way."""
    links = [tier.joined for tier in tiers]
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def flat_ring_all_reduce(tiers: Sequence[Tier], size: float) -> float:
    """One ring over all ranks, which waits for its slowest link in each step."""
    tiers = without_empty(tiers)
    return collectives.ring_all_reduce(ranks_of(tiers), size, slowest(tiers)) if tiers else 0.0


def flat_ring_pass(tiers: Sequence[Tier], size: float) -> float:
    """A reduce-scatter or an all-gather as one ring over all ranks."""
    return flat_ring_all_reduce(tiers, size) / 2


def tree_all_reduce(tiers: Sequence[Tier], size: float) -> float:
    """A double binary tree over the domains, and a chain within each innermost domain, as in NCCL.

    2((k−1)α + Σ⌈log₂ n⌉α) + 2B/0.92β: k ranks in a chain, n domains at each tier, β of the slowest tier.
    """
    tiers = without_empty(tiers)
    if not tiers:
        return 0.0
    *chain, last = tiers
    latency = collectives.depth(last.size) * last.link.latency
    if chain:
        latency += (chain[0].size - 1) * chain[0].link.latency
        latency += sum(collectives.depth(tier.size) * tier.link.latency for tier in chain[1:])
    return 2 * (latency + size / (TREE_SHARE * slowest(tiers).bandwidth))


def switch_all_reduce(tiers: Sequence[Tier], size: float) -> float:
    """The switches of each tier reduce what comes from below: 2 Σα + B/β of the slowest."""
    tiers = without_empty(tiers)
    if not tiers:
        return 0.0
    return 2 * sum(tier.link.latency for tier in tiers) + size / slowest(tiers).bandwidth


def leaders_all_reduce(tiers: Sequence[Tier], size: float) -> float:
    """Ring of the whole buffer within each domain, ring of the whole buffer over one leader of each, broadcast within.

    The leader has one link of its own, whatever the rails: that is why this loses for large buffers.
    """
    tiers = without_empty(tiers)
    if len(tiers) < 2:
        return flat_ring_all_reduce(tiers, size)
    inner, *outer = tiers
    leaders = [Tier(tier.size, tier.link, min(tier.rails, 1.0)) for tier in outer]
    within = collectives.ring_all_reduce(inner.size, size, inner.joined)
    spread = collectives.broadcast(inner.size, size, inner.joined)
    return within + leaders_all_reduce(leaders, size) + spread


def sharded_all_reduce(tiers: Sequence[Tier], size: float) -> float:
    """Reduce-scatter within each domain, all-reduce of the shards over all rails at once, all-gather within.

    Each of the n ranks of a domain carries B/n on rails/n links, so that the outer tiers carry B over all rails.
    """
    tiers = without_empty(tiers)
    if not tiers:
        return 0.0
    return 2 * sharded_pass(tiers, size)


def sharded_pass(tiers: Sequence[Tier], size: float) -> float:
    """A reduce-scatter (inwards first) or an all-gather (outwards first), tier by tier."""
    total, shards = 0.0, 1
    for tier in without_empty(tiers):
        link = tier.joined.shared_by(shards)
        total += collectives.ring_pass(tier.size, size / shards, link)
        shards *= tier.size
    return total


def all_to_all(tiers: Sequence[Tier], size: float) -> float:
    """Each rank sends every other rank its part. The tiers carry their parts at the same time; the slowest decides.

    What leaves a domain of k ranks: k · B/n · (n−k) bytes over its rails. Within the innermost tier only the parts
    for its own ranks count, for each GPU reaches a NIC without the others.
    """
    tiers = without_empty(tiers)
    ranks, below, latency, longest = ranks_of(tiers), 1, 0.0, 0.0
    for tier in tiers:
        above = tier.size if below == 1 else ranks
        leaving = below * size / ranks * (above - below)
        longest = max(longest, leaving / tier.joined.bandwidth)
        latency += below * (tier.size - 1) * tier.link.latency
        below *= tier.size
    return latency + longest
