"""The seam: what a scheme of redundancy answers, and the values in its questions and answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muster.fabric.placement.failure_domains import FailureDomains


VERSIONS_KEPT = 2
"""A node keeps two versions for other nodes: the committed one, and the next one while it arrives."""

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Protection:
    """Who holds what in a generation.

    `holders`: for each node, the nodes that hold whole copies of its ranks' shards. `groups`: the protection groups.
    The nodes of a group hold parts for each other. A part combines shards of different nodes.
    """

    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: Groups = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A further node that keeps a rank's shard, besides the rank's own node.

    `holder`: that node. `ranks`: the ranks whose shards are combined there. If empty, `holder` keeps a whole copy.
    `part`: the number of the part that `holder` keeps. There is one part for each of `ranks`.
    """

    holder: str
    ranks: tuple[int, ...] = ()
    part: int = 0


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """What one node sends and keeps in a generation.

    `shards_sent`: for each rank of this node, all places of its shard. A version is committed only when each shard is
    in all its places. `others_sent`: the places of any other shard in this node's memory. Such a shard is here because
    ranks have moved. `copied_ranks`: the ranks of other nodes whose shards this node keeps whole. `parts`: the parts
    that this node keeps. `share_of_parts`: the memory of these parts, in shards of one rank. `words`: what this node
    keeps, for people.
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
    """A complete part, as its holder reports it.

    `ranks`: the ranks whose shards are combined. `part`: the number of this part. `digests`, `sizes`: one for each of
    `ranks`. The shard of `ranks[part]` is not in this part: its digest is empty, and its size is 0.
    """

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
