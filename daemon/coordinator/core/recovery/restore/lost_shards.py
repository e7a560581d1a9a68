"""Lost shards that can be rebuilt from what nodes hold, and where from. How is the scheme's matter
(`checkpoint/redundancy`)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.checkpoint.redundancy.scheme import Redundancy
from muster.daemon.coordinator.core.state.events import CombinedShards, Shard, Version
from muster.daemon.coordinator.core.state.facts import ShardSource

Held = Mapping[str, Sequence[Shard]]
"""Shards in memory, by node."""


@dataclass(frozen=True, slots=True)
class Rebuildable:
    """A shard that no node holds. `ranks`, `nodes`: as in `scheme.RebuiltShard`."""

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


def rebuildable(
    redundancy: Redundancy,
    held: Held,
    combined: Mapping[str, Sequence[CombinedShards]],
    leaving: Iterable[str] = (),
) -> list[Rebuildable]:
    """All shards that can be rebuilt and that no node holds.

    Args:
        redundancy: of the gang.
        held: shards in memory, by node.
        combined: whole parts that combine shards, by node.
        leaving: nodes that are used only if no other node holds the same part.
    """
    last = frozenset(leaving)
    parts: dict[Version, list[tuple[str, CombinedShards]]] = {}
    for node in sorted(combined, key=lambda node: (node in last, node)):
        for part in combined[node]:
            parts.setdefault(part.version, []).append((node, part))
    digests: dict[Version, dict[int, set[str]]] = {version: {} for version in parts}
    sharded: set[Version] = set()
    for shards in held.values() if parts else ():
        for shard in shards:
            digests.setdefault(shard.version, {}).setdefault(shard.rank, set()).add(shard.digest)
            if shard.sharded:
                sharded.add(shard.version)
    return [
        Rebuildable(
            Shard(one.rank, version, primary=False, digest=one.digest, size=one.size, sharded=version in sharded),
            one.ranks,
            one.nodes,
        )
        for version in sorted(parts)
        for one in redundancy.rebuild(digests[version], parts[version])
    ]


def added(held: Held, found: Iterable[Rebuildable]) -> Held:
    """`held` with shards that can be rebuilt, as if the first node that they are rebuilt from had them."""
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
