"""The seam: what a scheme of redundancy answers, and the values in its questions and answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muster.fabric.placement.failure_domains import FailureDomains


VERSIONS_KEPT = 2
"""Of what a node keeps for others: the committed version, and the next one while it comes."""

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Protection:
    """Who holds what in a generation.

    `holders`: for each node, those that hold whole copies of its ranks' shards. `groups`: nodes that hold parts for
    each other, in which shards of different nodes are combined.
    """

    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Groups = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's shard is, beside its own node.

    `ranks`, `part`: of the combined shards, and which of their parts. Without ranks, `holder` keeps a whole copy.
    """

    holder: str
    ranks: tuple[int, ...] = ()
    part: int = 0


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """What one node sends and keeps in a generation.

    `shards_sent`: for each rank of this node, all places of its shard. A version is committed only when it is in all of
    them. `others_sent`: the places of a shard of another node that only this node holds, after ranks have moved.
    `copied_ranks`: those of other nodes whose shards are kept whole. `parts`: those that are kept.
    `share_of_parts`: how many times the shard of one rank these parts need. `words`: what is kept, for people.
    """

    shards_sent: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)
    others_sent: tuple[Place, ...] = ()
    copied_ranks: tuple[int, ...] = ()
    parts: tuple[Place, ...] = ()
    share_of_parts: float = 0.0
    words: str = ""

    def sent(self, rank: int) -> tuple[Place, ...]:
        """All places of a shard that this node holds."""
        return self.shards_sent.get(rank, self.others_sent)


class CombinedShards(Protocol):
    """A whole part, as the node that holds it reports it. `digests`, `sizes`: of the shards in it, in the order of
    `ranks`; empty and 0 at place `part`, which is not in it."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def part(self) -> int: ...
    @property
    def digests(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class RebuiltShard:
    """A shard that no node holds. It is rebuilt from parts that combine `ranks`, and from the other ranks' shards.

    `nodes`: one for each part that is needed, in the order of the parts; a node may hold several.
    """

    rank: int
    digest: str
    size: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of each node's memory that are kept for others. `name`, `words`: what they are, for people."""

    bytes: float
    name: str
    words: str


class Redundancy(Protocol):
    """What a job has asked for."""

    @property
    def rebuilds(self) -> bool:
        """Whether a shard that no node holds may still be had."""

    @property
    def together(self) -> str:
        """Which nodes shall not fail together, for people: "pairs of ..."."""

    def protect(
        self,
        ranked: Sequence[str],
        apart: FailureDomains,
        before: Groups = (),
        moved: Mapping[str, str] | None = None,
    ) -> Protection:
        """Who holds what in the next generation.

        Args:
            ranked: nodes that carry ranks, in the order of group ranks.
            apart: what nodes that hold the same state shall not share.
            before: the groups of the generation before.
            moved: for each node of that generation, the one in its seat now. None: the number of seats has changed.
        """

    def memory_need(self, nodes: int, state: float, unshared: float) -> MemoryNeed:
        """What each node keeps for others.

        Args:
            nodes: of the job.
            state: bytes of the state of one node's ranks.
            unshared: those of them that differ from node to node.
        """

    def rebuild(
        self, held: Mapping[int, Collection[str]], parts: Sequence[tuple[str, CombinedShards]]
    ) -> list[RebuiltShard]:
        """The shards of one version that no node holds and that can be rebuilt.

        Args:
            held: the digests of the shards that some node holds, by rank.
            parts: whole parts, each with the node that holds it. Of equal ones the first is used.
        """
