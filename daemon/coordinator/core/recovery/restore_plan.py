"""Which state a generation starts from: the newest version of which every rank's shard stands in a survivor's memory.

Versions are never mixed: a rank that lacks the newest makes the whole gang take the one before. A generation of fewer
ranks than wrote a version needs no more shards than it has ranks: replicas hold the same state.
"""

from collections.abc import Callable, Mapping, Sequence

from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.events import Shard, Version
from muster.daemon.coordinator.core.state.facts import ShardSource

Held = Mapping[str, Sequence[Shard]]
"""Shards in memory, by node."""


def newest_complete_version(held: Held, ranks_of: Callable[[Version], int]) -> Version | None:
    """The newest version of which the shards of the first `ranks_of(version)` ranks, all that count, are held by
    somebody; None where there is none."""
    ranks: dict[Version, set[int]] = {}
    for shards in held.values():
        for shard in shards:
            ranks.setdefault(shard.version, set()).add(shard.rank)
    complete = [v for v, have in ranks.items() if have.issuperset(range(ranks_of(v)))]
    return max(complete, default=None)


def memory_is_obsolete(gang: Gang | None, generation: int) -> bool:
    """Whether what nodes keep since the gang's job was requeued, when `generation` was its newest, is of no more use: a
    newer generation has started, from it or without it, or the gang is over. Of an unknown gang nothing is known."""
    return gang is not None and (gang.final or gang.generation > generation)


def choose_sources(
    held: Held, version: Version, count: int, home: Mapping[int, str], leaving: frozenset[str]
) -> tuple[ShardSource, ...]:
    """One source for each of the first `count` ranks of `version`.

    Args:
        held: shards by node.
        version, count: as `newest_complete_version` found it.
        home: the node each rank will run on (rank → node).
        leaving: nodes that are on their way out; used where nobody else holds the shard.

    Preferred: the rank's own node, then its own slot elsewhere, then a buddy's copy; a node that leaves comes last.
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
