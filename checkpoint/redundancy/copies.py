"""Whole copies: each node's shards are on other nodes as well. The first of them is its buddy; most jobs have no other.

Copies cross failure domains: a node and its holders share as few of them as possible. A copy needs memory only for
bytes that the holder's own ranks do not hold as well, so replicas of data parallelism cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.checkpoint.redundancy.scheme import (
    VERSIONS_KEPT,
    CombinedShards,
    Groups,
    MemoryNeed,
    NodePlaces,
    Place,
    Protection,
    RebuiltShard,
)

if TYPE_CHECKING:
    from muster.fabric.placement.failure_domains import FailureDomains

MEMORY_NAME = "copies"


@dataclass(frozen=True, slots=True)
class Copies:
    """`count`: on how many other nodes each shard is, as far as there are so many. Methods as in `Redundancy`."""

    count: int = 1
    rebuilds = False
    together = "buddies"

    def protect(
        self,
        ranked: Sequence[str],
        apart: FailureDomains,
        before: Groups = (),
        moved: Mapping[str, str] | None = None,
    ) -> Protection:
        """The nodes that share least with each node hold its shards."""
        ring = apart.ring(ranked)
        return Protection({node: tuple(apart.next_apart(ring, at, self.count)) for at, node in enumerate(ring)})

    def memory_need(self, nodes: int, state: float, unshared: float) -> MemoryNeed:
        """Two versions of what each copy has of its own."""
        copies = self.count * unshared if nodes > 1 else 0.0
        return MemoryNeed(VERSIONS_KEPT * copies, MEMORY_NAME, "copies for other nodes")

    def rebuild(
        self, held: Mapping[int, Collection[str]], parts: Sequence[tuple[str, CombinedShards]]
    ) -> list[RebuiltShard]:
        """Nothing: without a copy a shard is lost."""
        return []


def places(protection: Protection, ranks_on: Mapping[str, Sequence[int]], node: str) -> NodePlaces:
    """What one node sends and keeps. `ranks_on`: the ranks of each node."""
    sent = tuple(Place(holder) for holder in protection.holders.get(node, ()) if holder != node)
    copied = [rank for of, ranks in ranks_on.items() if node in protection.holders.get(of, ()) for rank in ranks]
    return NodePlaces(
        dict.fromkeys(ranks_on.get(node, ()), sent), sent, tuple(copied), words="copies of other nodes' states"
    )
