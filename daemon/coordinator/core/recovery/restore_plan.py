"""The restore plan: which version a generation starts from, and where each rank's shard is read.

The version is the newest of which a surviving node holds every rank's shard. Versions are never mixed: if one rank
lacks the newest, the whole gang takes the one before. A generation with fewer ranks than wrote the version needs only
as many shards as it has ranks, because replicas hold the same state.
"""

from collections.abc import Callable, Mapping, Sequence

from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.events import Shard, Version
from muster.daemon.coordinator.core.state.facts import ShardSource

Held = Mapping[str, Sequence[Shard]]
"""Shards in memory, by node."""


def newest_complete_version(held: Held, ranks_of: Callable[[Version], int]) -> Version | None:
    """The newest version of which the shards of ranks 0 to `ranks_of(version)` - 1 are all held; None if there is
    none."""
    ranks: dict[Version, set[int]] = {}
    for shards in held.values():
        for shard in shards:
            ranks.setdefault(shard.version, set()).add(shard.rank)
    complete = [v for v, have in ranks.items() if have.issuperset(range(ranks_of(v)))]
    return max(complete, default=None)


def memory_is_obsolete(gang: Gang | None, generation: int) -> bool:
    """Whether the memory that nodes keep of an earlier run is of no more use. `generation`: the newest one of that run.

    It is obsolete when a newer generation has started, or the gang is over. Nothing is known of an unknown gang, so its
    memory is kept.
    """
    return gang is not None and (gang.final or gang.generation > generation)


def choose_sources(
    held: Held, version: Version, count: int, home: Mapping[int, str], leaving: frozenset[str]
) -> tuple[ShardSource, ...]:
    """One source for each of the first `count` ranks of `version`.

    Args:
        held: shards by node.
        version, count: as `newest_complete_version` found them.
        home: rank → the node that the rank will run on.
        leaving: removed nodes; used only if no other node holds the shard.

    The rank's own node comes first, then a primary shard elsewhere, then a buddy's replica; a leaving node comes last.
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
