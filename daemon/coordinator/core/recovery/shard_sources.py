"""From where shards are had: from a node that holds them, or rebuilt from what nodes hold. How is the scheme's matter
(`checkpoint/redundancy`). Pure."""

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


def sources_to_start(
    held: Held,
    rebuilt: Iterable[Rebuildable],
    version: Version,
    count: int,
    home: Mapping[int, str],
    leaving: frozenset[str],
) -> tuple[tuple[ShardSource, ...], tuple[ShardSource, ...]]:
    """One source for each of the first `count` ranks of `version`, and all others. Arguments as for `choose_sources`.

    `rebuilt`: shards that can be rebuilt.
    """
    sources = choose_sources(held, version, count, home, leaving)
    others = other_sources(held, version, sources, leaving)
    lost = set(range(count)) - {source.rank for source in sources}
    rebuilt_from = list(sources_of(rebuilt, version, lost))
    others = (*others, *combined_sources(held, version, rebuilt_from, count, leaving))
    sources = tuple(sorted((*sources, *(one for one in rebuilt_from if one.digest)), key=lambda source: source.rank))
    return sources, (*others, *(one for one in rebuilt_from if not one.digest))


def choose_sources(
    held: Held, version: Version, count: int, home: Mapping[int, str], leaving: frozenset[str]
) -> tuple[ShardSource, ...]:
    """One source for each of the first `count` ranks of `version`.

    Args:
        held: shards by node.
        version, count: as `restore_plan.newest_complete_version` found them.
        home: rank → the node that the rank will run on.
        leaving: removed nodes; used only if no other node holds the shard.

    The rank's own node comes first, then a primary shard elsewhere, then a replica; a leaving node comes last.
    """

    def rating(node: str, shard: Shard) -> tuple[bool, bool, bool]:
        return (node in leaving, node != home.get(shard.rank), not shard.primary)

    best: dict[int, tuple[tuple[bool, bool, bool], str, Shard]] = {}
    for node in sorted(held):
        for shard in held[node]:
            if shard.version != version or shard.rank >= count:
                continue
            candidate = (rating(node, shard), node, shard)
            if shard.rank not in best or candidate[:2] < best[shard.rank][:2]:
                best[shard.rank] = candidate
    return tuple(ShardSource(rank, node, s.primary, s.digest) for rank, (_, node, s) in sorted(best.items()))


def other_sources(
    held: Held, version: Version, chosen: Sequence[ShardSource], leaving: frozenset[str]
) -> tuple[ShardSource, ...]:
    """Further nodes that hold the shards which `choose_sources` has chosen, primary shards first, without digests.

    Agents fetch from all of them at once, and go on with these if the chosen copy is corrupt. A leaving node need not
    wait for that.
    """
    by_rank = {source.rank: source for source in chosen}
    found: dict[tuple[int, bool, str], ShardSource] = {}
    for node, shards in held.items():
        for shard in shards if node not in leaving else ():
            source = by_rank.get(shard.rank)
            if source is None or shard.version != version or node == source.node or shard.digest != source.digest:
                continue
            found[shard.rank, not shard.primary, node] = ShardSource(shard.rank, node, shard.primary, "")
    return tuple(source for _, source in sorted(found.items()))


def combined_sources(
    held: Held, version: Version, rebuilt_from: Iterable[ShardSource], count: int, leaving: frozenset[str]
) -> tuple[ShardSource, ...]:
    """One source for each shard that is combined with a lost one in `rebuilt_from`, and that no rank of a generation
    starts from: those of ranks `count` and up. Without them the lost shards can't be rebuilt."""
    combined = {rank for source in rebuilt_from for rank in source.combined_ranks if rank >= count}
    if not combined:
        return ()
    chosen = choose_sources(held, version, 1 + max(combined), {}, leaving)
    return tuple(source for source in chosen if source.rank in combined)


def sources_of(found: Iterable[Rebuildable], version: Version, ranks: Iterable[int]) -> Iterator[ShardSource]:
    """All sources from which the shards of `ranks` at `version` are rebuilt."""
    wanted = frozenset(ranks)
    for one in found:
        if one.shard.version == version and one.shard.rank in wanted:
            yield from one.sources()
