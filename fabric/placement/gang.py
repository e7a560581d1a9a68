"""What placement needs to know of one gang: small, hashable, and enough to make its groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.weights import Weight, Weights


@dataclass(frozen=True)
class GangTraffic:
    """Axes, weights, and where groups shall be. Groups are made once, when they are first asked for.

    Raises:
        ValueError: the ranks do not fill whole nodes.
    """

    axes: Axes
    local_ranks: int
    """Ranks of each node."""
    weights: tuple[tuple[GroupKind, Weight], ...]
    required: tuple[tuple[GroupKind, Level], ...] = ()
    preferred: tuple[tuple[GroupKind, Level], ...] = ()
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Refuses ranks that do not fill whole nodes."""
        if self.local_ranks < 1 or self.axes.world_size % self.local_ranks:
            raise ValueError(f"{self.axes.world_size} ranks do not fill nodes of {self.local_ranks} ranks")

    @property
    def seats(self) -> int:
        """Nodes that carry ranks."""
        return self.axes.world_size // self.local_ranks

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups that communicate between nodes."""
        return node_groups(
            self.axes,
            self.local_ranks,
            dict(self.weights),
            virtual_stages=self.virtual_stages,
            required=dict(self.required),
            preferred=dict(self.preferred),
        )

    def with_seats(self, seats: int) -> GangTraffic:
        """The same gang with fewer or more data-parallel replicas.

        Raises:
            ValueError: the ranks of so many nodes are no whole number of replicas.
        """
        others = self.axes.world_size // self.axes.data
        data, rest = divmod(seats * self.local_ranks, others)
        if rest or not data:
            raise ValueError(f"{seats} nodes are no whole number of replicas: a replica has {others} ranks")
        return replace(self, axes=replace(self.axes, data=data))


def gang_traffic(
    axes: Axes,
    local_ranks: int,
    weights: Weights,
    packings: Iterable[tuple[GroupKind, Level, bool]] = (),
    virtual_stages: int = 1,
) -> GangTraffic:
    """The traffic of a gang.

    Args:
        axes: degrees and order.
        local_ranks: ranks of each node.
        weights: what one group of each kind sends in one step.
        packings: kind, level, and whether the level is required, not only preferred.
        virtual_stages: of the pipeline.
    """
    levels: Mapping[bool, list[tuple[GroupKind, Level]]] = {True: [], False: []}
    for kind, level, required in packings:
        if level is not Level.ANY:
            levels[required].append((kind, level))
    return GangTraffic(
        axes, local_ranks, tuple(weights.items()), tuple(levels[True]), tuple(levels[False]), virtual_stages
    )
