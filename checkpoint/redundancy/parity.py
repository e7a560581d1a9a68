"""Parities: the nodes of a group hold the XOR of their shards together, so that one node of each group may be lost.

Ranks with the same place on the nodes of a group have one parity of N parts, one on each of these nodes: part P is the
XOR of pieces of all ranks but the one at place P, on whose node it is. The shard of one rank is rebuilt from the N - 1
parts that it is in, and from the shards of all other ranks in them. One part or one shard less is one too few.

A node sends its ranks' shards once, and receives as much, as with whole copies; but of the N nodes of a group each one
holds only 1/(N - 1) of its ranks' state. That pays where the states of all ranks differ.

This is the scheme "XOR" of SCR: A. Moody, G. Bronevetsky, K. Mohror and B. de Supinski, "Design, Modeling, and
Evaluation of a Scalable Multi-level Checkpointing System", SC10. It goes back to W. Gropp, R. Ross and N. Miller,
"Providing Efficient I/O Redundancy in MPI Environments", 2004.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
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

MEMORY_NAME = "parity"

_Parts = Mapping[int, tuple[str, CombinedShards]]
"""By number: the node that holds a part, and what it says of it."""


@dataclass(frozen=True, slots=True)
class Parity:
    """`most`: nodes of a group, 3 or more. Methods as in `Redundancy`."""

    most: int
    rebuilds = True
    together = "a parity group"

    def protect(
        self,
        ranked: Sequence[str],
        apart: FailureDomains,
        before: Groups = (),
        moved: Mapping[str, str] | None = None,
    ) -> Protection:
        """Groups of `most` nodes at most, and equally large as far as possible. A node that would be alone is added to
        another group. Groups stay, with new nodes in the place of lost ones, unless other groups share less: what they
        hold stays of use."""
        if len(ranked) < 2:
            return Protection()
        groups = self._dealt_out(ranked, apart)
        if not moved or {node for group in before for node in group} != moved.keys():
            return Protection(groups=groups)
        kept = tuple(tuple(moved[node] for node in group) for group in before)
        return Protection(groups=groups if _shared_within(apart, groups) < _shared_within(apart, kept) else kept)

    def _dealt_out(self, ranked: Sequence[str], apart: FailureDomains) -> Groups:
        """Nodes of one domain follow each other, in domains of all sizes, and are dealt out to the groups in turn. So
        each group gets as few of them as possible."""
        count = max(1, min(-(-len(ranked) // self.most), len(ranked) // 2))
        order = apart.fabric.order
        first: dict[object, int] = {}
        for position, node in enumerate(sorted(ranked, key=order.__getitem__)):
            for kind, domain in enumerate(apart.of[node]):
                first.setdefault((kind, domain), position)
        kinds = sorted(range(len(apart.kinds)), key=lambda kind: not apart.required[kind])
        dealt = sorted(ranked, key=lambda node: (*(first[kind, apart.of[node][kind]] for kind in kinds), order[node]))
        return tuple(tuple(dealt[number::count]) for number in range(count))

    def memory_need(self, nodes: int, state: float, unshared: float) -> MemoryNeed:
        """Two versions of one part, in the smallest group: parts hold all bytes, whatever the ranks have in common."""
        smallest = nodes // -(-nodes // self.most)
        return MemoryNeed(VERSIONS_KEPT * state / (smallest - 1), MEMORY_NAME, "parity of its group")

    def rebuild(
        self, held: Mapping[int, Collection[str]], parts: Sequence[tuple[str, CombinedShards]]
    ) -> list[RebuiltShard]:
        """The only lost rank of each parity, if nothing else is missing."""
        of_ranks: dict[tuple[int, ...], dict[int, tuple[str, CombinedShards]]] = {}
        for node, part in parts:
            of_ranks.setdefault(part.ranks, {}).setdefault(part.part, (node, part))
        found: dict[int, RebuiltShard] = {}
        for ranks, by_number in sorted(of_ranks.items()):
            lost = [rank for rank in ranks if rank not in held and rank not in found]
            for rank in lost if len(lost) == 1 else ():
                if (one := _rebuilt(rank, ranks, by_number, held)) is not None:
                    found[rank] = one
        return list(found.values())


def _rebuilt(
    rank: int, ranks: tuple[int, ...], parts: _Parts, held: Mapping[int, Collection[str]]
) -> RebuiltShard | None:
    """None if some part is missing, or has combined other shards."""
    at, needed = ranks.index(rank), parts_with(rank, ranks)
    if any(number not in parts for number in needed):
        return None
    used = [parts[number] for number in needed]
    digest, size = used[0][1].digests[at], used[0][1].sizes[at]
    for _, part in used:
        for other, combined in zip(ranks, part.digests, strict=True):
            if combined and combined not in ({digest} if other == rank else held.get(other, ())):
                return None
    return RebuiltShard(rank, digest, size, ranks, tuple(node for node, _ in used)) if digest else None


def parts_with(rank: int, ranks: Sequence[int]) -> list[int]:
    """The numbers of the parts that a rank's shard is in: all but its own."""
    return [number for number, other in enumerate(ranks) if other != rank]


def places(protection: Protection, ranks_on: Mapping[str, Sequence[int]], node: str) -> NodePlaces:
    """What one node sends and keeps. `ranks_on`: the ranks of each node."""
    group = next((group for group in protection.groups if node in group), ())
    ordered = {member: sorted(ranks_on.get(member, ())) for member in group}
    sent: dict[int, tuple[Place, ...]] = {}
    held: list[Place] = []
    for place, rank in enumerate(ordered.get(node, ())):
        of = {member: ranks[place] for member, ranks in ordered.items() if place < len(ranks)}
        parts = [Place(holder, tuple(of.values()), number) for number, holder in enumerate(of)]
        held += [part for part in parts if part.holder == node and len(of) > 1]
        sent[rank] = tuple(part for part in parts if part.holder != node)
    share = sum(1 / (len(part.ranks) - 1) for part in held)
    return NodePlaces(sent, parts=tuple(held), share_of_parts=share, words="parts of parities")


def _shared_within(apart: FailureDomains, groups: Groups) -> int:
    """How many failure domains the pairs of nodes within groups share."""
    return sum(apart.shared(one, other) for group in groups for one, other in combinations(group, 2))
