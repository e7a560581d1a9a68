"""Which nodes of a job belong together, as [placement] says: groups that share a node are packed as one piece. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, Groups, pipeline_pairs, rank_groups
from muster.fabric.model.level import Level
from muster.launcher.spec.placement import Placement

_HEAVIEST_FIRST = (
    GroupKind.TENSOR,
    GroupKind.EXPERT,
    GroupKind.CONTEXT,
    GroupKind.PIPELINE,
    GroupKind.DATA,
    GroupKind.EXPERT_DATA,
)


@dataclass(frozen=True, slots=True)
class PackedPieces:
    """What one kind of group asks for: pieces of so many nodes, each within one domain."""

    kind: GroupKind
    nodes: int
    """Nodes of the largest piece. The pieces of tighter kinds are inside."""
    pieces: int
    level: Level
    """LEAF or POD: groups that shall be in a node or in an NVLink domain, and have several nodes, are in a leaf at
    best.
    """
    required: bool
    asked: str = "leaf"
    """The word of job.toml: "nvlink", though `level` is LEAF."""

    @property
    def words(self) -> str:
        """What the job asks, in words."""
        verb = "must" if self.required else "shall"
        return f"{self.kind} groups {verb} be within one {self.level.word}: {self.pieces} times {self.nodes} nodes"


def clusters_of(axes: Axes, placement: Placement, nodes: int, *, virtual_stages: int) -> tuple[PackedPieces, ...]:
    """What the groups that span nodes ask for: leaves before pods, required before preferred, heavy traffic first.

    Each entry includes the entries before it: its pieces join theirs.
    """
    local_ranks = axes.world_size // nodes
    asking = [
        (kind, packing.required, max(packing.level, Level.LEAF))
        for kind in _HEAVIEST_FIRST
        if (packing := placement.packing(kind)).level is not Level.ANY
    ]
    asking.sort(key=lambda one: (one[2], not one[1]))  # stable
    joined = _Joined(nodes)
    found = []
    for kind, required, level in asking:
        groups = (
            pipeline_pairs(axes, virtual_stages=virtual_stages)
            if kind is GroupKind.PIPELINE
            else rank_groups(axes, kind)
        )
        if joined.join(groups, local_ranks):
            sizes = joined.sizes()
            asked = placement.packing(kind).level.word
            found.append(PackedPieces(kind, max(sizes), len(sizes), level, required, asked))
    return tuple(found)


class _Joined:
    """Nodes in disjoint pieces."""

    def __init__(self, nodes: int) -> None:
        self._above = list(range(nodes))

    def join(self, groups: Groups, local_ranks: int) -> bool:
        """Joins the nodes of each group. Returns whether a group has several nodes."""
        spans = False
        for group in groups:
            first, *others = dict.fromkeys(rank // local_ranks for rank in group)
            for node in others:
                spans = True
                self._above[self._top(node)] = self._top(first)
        return spans

    def sizes(self) -> list[int]:
        """The number of nodes of each piece."""
        return list(Counter(self._top(node) for node in range(len(self._above))).values())

    def _top(self, node: int) -> int:
        above = self._above
        while above[node] != node:
            above[node] = above[above[node]]
            node = above[node]
        return node
