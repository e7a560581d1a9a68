"""How far the groups of a rank reach: the tightest level of the network that holds all ranks of each group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.groups.rank_place import axes_of_world, group_of
from muster.fabric.model.level import Level
from muster.v1.common_pb2 import JobSpec, Member


def axes_of(spec: JobSpec, world_size: int) -> Axes | None:
    """The axes of a generation of `world_size` ranks; None: the job has none."""
    return axes_of_world(
        world_size,
        tensor=spec.tensor_parallel,
        context=spec.context_parallel,
        expert=spec.expert_parallel,
        pipeline=spec.pipeline_parallel,
        order=spec.parallel_order,
    )


def group_levels(
    axes: Axes, rank: int, local_ranks: int, nodes: Sequence[str], members: Mapping[str, Member]
) -> dict[str, str]:
    """The level of each group of `rank` that has other ranks, by the kind of the group: {"tensor": "node"}.

    Args:
        local_ranks: ranks of each node.
        nodes: the nodes that carry ranks, by group rank.
        members: the members of the gang by node.
    """
    found = {}
    for kind in GroupKind:
        if kind is GroupKind.EXPERT_DATA and axes.expert == 1:
            continue  # the same group as that of data
        group = group_of(axes, kind, rank)
        if len(group) > 1:
            seats = {other // local_ranks for other in group}
            found[kind.value] = level_of([members.get(nodes[seat], Member()) for seat in seats]).word
    return found


def level_of(members: Sequence[Member]) -> Level:
    """The tightest level that holds all these nodes. What nobody knows holds no two nodes."""
    if len(members) == 1:
        return Level.NODE
    for level, names in (
        (Level.NVLINK, (member.nvlink_domain for member in members)),
        (Level.LEAF, (member.leaf for member in members)),
        (Level.POD, (member.pod for member in members)),
    ):
        if _all_one(names):
            return level
    return Level.ANY


def _all_one(names: Iterable[str]) -> bool:
    found = set(names)
    return len(found) == 1 and "" not in found
