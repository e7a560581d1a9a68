"""Which lost shards can be rebuilt from parities, and from which nodes.

The parity of N ranks has N parts. The shard of one rank is rebuilt from the N - 1 parts that it is in, and from the
shards of all other ranks in them (`checkpoint/store/parity`). So one part or one shard less is one too few.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muster.daemon.coordinator.core.state.events import Parity, Shard, Version
from muster.daemon.coordinator.core.state.facts import ShardSource

Held = Mapping[str, Sequence[Shard]]
"""Shards in memory, by node."""
Parts = Mapping[int, Sequence[tuple[str, Parity]]]
"""The nodes that hold each part of one parity, with what they say of it."""


@dataclass(frozen=True, slots=True)
class Rebuildable:
    """A shard that no node holds. `nodes`: one for each part that it is rebuilt from, in the order of the parts; a node
    may hold several. `ranks`: of the parity."""

    shard: Shard
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]

    def sources(self) -> list[ShardSource]:
        """All of them, for a restore plan. The first one has the digest."""
        first, *others = self.nodes
        shard = self.shard
        return [
            ShardSource(shard.rank, first, False, shard.digest, self.ranks),
            *(ShardSource(shard.rank, node, False, "", self.ranks) for node in others),
        ]


def rebuildable(held: Held, parities: Mapping[str, Sequence[Parity]], leaving: Iterable[str] = ()) -> list[Rebuildable]:
    """All shards that can be rebuilt and that no node holds.

    Args:
        held: shards in memory, by node.
        parities: whole parts, by node.
        leaving: nodes that are used only if no other node holds the same part.
    """
    digests: dict[tuple[Version, int], set[str]] = {}
    sharded: set[Version] = set()
    for shards in held.values():
        for shard in shards:
            digests.setdefault((shard.version, shard.rank), set()).add(shard.digest)
            if shard.sharded:
                sharded.add(shard.version)
    last = frozenset(leaving)
    parts: dict[tuple[Version, tuple[int, ...]], dict[int, list[tuple[str, Parity]]]] = {}
    for node in sorted(parities, key=lambda node: (node in last, node)):
        for parity in parities[node]:
            parts.setdefault((parity.version, parity.ranks), {}).setdefault(parity.part, []).append((node, parity))
    found: dict[tuple[Version, int], Rebuildable] = {}
    for (version, ranks), of in sorted(parts.items()):
        lost = [rank for rank in ranks if (version, rank) not in digests and (version, rank) not in found]
        for rank in lost if len(lost) == 1 else ():
            if (one := _rebuildable(rank, version, ranks, of, digests)) is not None:
                found[version, rank] = replace(one, shard=replace(one.shard, sharded=version in sharded))
    return list(found.values())


def _rebuildable(
    rank: int,
    version: Version,
    ranks: tuple[int, ...],
    parts: Parts,
    digests: Mapping[tuple[Version, int], set[str]],
) -> Rebuildable | None:
    """The only lost rank of a parity; None if some part is missing, or has combined other shards."""
    at = ranks.index(rank)
    needed = [number for number in range(len(ranks)) if number != at]
    if any(not parts.get(number) for number in needed):
        return None
    used = [parts[number][0] for number in needed]
    digest, size = used[0][1].digests[at], used[0][1].sizes[at]
    for _, parity in used:
        for other, combined in zip(ranks, parity.digests, strict=True):
            if combined and combined not in ({digest} if other == rank else digests.get((version, other), set())):
                return None
    shard = Shard(rank, version, primary=False, digest=digest, size=size)
    return Rebuildable(shard, ranks, tuple(node for node, _ in used)) if digest else None


def added(held: Held, found: Iterable[Rebuildable]) -> Held:
    """`held` with shards that can be rebuilt, as if a holder of their parity had them."""
    all_shards = {node: list(shards) for node, shards in held.items()}
    for one in found:
        all_shards.setdefault(one.nodes[0], []).append(one.shard)
    return all_shards


def sources_of(found: Iterable[Rebuildable], version: Version, ranks: Iterable[int]) -> Iterator[ShardSource]:
    """All sources from which the shards of `ranks` at `version` are rebuilt."""
    wanted = frozenset(ranks)
    for one in found:
        if one.shard.version == version and one.shard.rank in wanted:
            yield from one.sources()
