"""The groups of ranks that communicate, in the order in which Megatron-LM's `parallel_state` makes them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

from muster.fabric.groups.axes import Axes, Axis

Groups = tuple[tuple[int, ...], ...]
"""Groups of global ranks. Each rank is in exactly one of them."""


class GroupKind(StrEnum):
    """A kind of group. The values are the words of job.toml and of output."""

    TENSOR = "tensor"
    """The ranks that share the matrices of a layer."""
    CONTEXT = "context"
    """The ranks that share a sequence."""
    EXPERT = "expert"
    """The ranks that hold different experts of one layer: all-to-all."""
    DATA = "data"
    """The ranks with the same parameters of dense layers, which average gradients: data and context together."""
    EXPERT_DATA = "expert data"
    """The ranks with the same experts, which average gradients of expert layers."""
    PIPELINE = "pipeline"
    """The ranks that hold different stages of one model. Neighbours send activations to each other."""


GROUP_AXES: dict[GroupKind, tuple[tuple[Axis, ...], bool]] = {
    GroupKind.TENSOR: ((Axis.TENSOR,), False),
    GroupKind.CONTEXT: ((Axis.CONTEXT,), False),
    GroupKind.EXPERT: ((Axis.EXPERT,), True),
    GroupKind.DATA: ((Axis.DATA, Axis.CONTEXT), False),
    GroupKind.EXPERT_DATA: ((Axis.DATA,), True),
    GroupKind.PIPELINE: ((Axis.PIPELINE,), False),
}
"""The axes on which the ranks of a group differ, and whether these are axes of expert layers."""


def rank_groups(axes: Axes, kind: GroupKind) -> Groups:
    """All groups of `kind`. Groups and ranks are in the order of Megatron-LM. A group may have one rank only."""
    over, expert_layers = GROUP_AXES[kind]
    return groups_over(axes, over, expert_layers=expert_layers)


def groups_over(axes: Axes, over: Iterable[Axis], *, expert_layers: bool = False) -> Groups:
    """The groups whose ranks differ on the axes `over` and agree on all others.

    Args:
        axes: the degrees and their order.
        over: axes of the layout. Megatron-LM writes "dp-cp" for data and context together.
        expert_layers: use the layout of expert layers, which has an expert axis and no context axis.
    """
    inside, outside = [0], [0]
    stride = 1
    wanted = set(over)
    for axis, degree in axes.layout(expert_layers=expert_layers):
        steps = [step * stride for step in range(degree)]
        if axis in wanted:
            inside = [step + rank for step in steps for rank in inside]
        else:
            outside = [step + rank for step in steps for rank in outside]
        stride *= degree
    return tuple(tuple(first + rank for rank in inside) for first in outside)


def pipeline_pairs(axes: Axes, *, virtual_stages: int = 1) -> Groups:
    """Each two ranks that send activations to each other.

    With more than one virtual stage the last stage also sends to the first one. Pipelines of one stage have no pair.
    """
    pairs: list[tuple[int, ...]] = []
    for stages in rank_groups(axes, GroupKind.PIPELINE):
        pairs += pairwise(stages)
        if virtual_stages > 1 and len(stages) > 2:
            pairs.append((stages[-1], stages[0]))
    return tuple(pairs)


def fits_in_blocks(axes: Axes, kind: GroupKind, block: int) -> bool:
    """Whether each group of `kind` lies within one block of `block` consecutive ranks, for example within a node.

    The number of ranks must be a multiple of `block`. The groups on an axis with stride s and degree d fill blocks of
    s * d ranks, so s * d must divide `block`.
    """
    over, expert_layers = GROUP_AXES[kind]
    degrees = dict(axes.layout(expert_layers=expert_layers))
    spans = [axes.stride(axis, expert_layers=expert_layers) * degrees[axis] for axis in over if degrees[axis] > 1]
    return axes.world_size <= block or all(block % span == 0 for span in spans)
