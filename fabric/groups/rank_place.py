"""The place of one rank: its coordinates on the axes, and its own group of each kind."""

from __future__ import annotations

from muster.fabric.groups.axes import MEGATRON_ORDER, Axes, AxesError, Axis, parse_order
from muster.fabric.groups.rank_groups import GROUP_AXES, GroupKind


def axes_of_world(
    world_size: int, *, tensor: int, context: int, expert: int, pipeline: int, order: str = ""
) -> Axes | None:
    """The axes of a job that runs with `world_size` ranks now; the data axis has what the others leave.

    A job that goes on with fewer nodes has fewer replicas. None: the degrees do not fit so many ranks. A degree of 0
    is 1.
    """
    tensor, context, expert, pipeline = (max(degree, 1) for degree in (tensor, context, expert, pipeline))
    data, rest = divmod(world_size, tensor * context * pipeline)
    if rest or not data:
        return None
    try:
        return Axes(tensor, context, expert, data, pipeline, parse_order(order) if order else MEGATRON_ORDER)
    except AxesError:
        return None


def coordinates(axes: Axes, rank: int) -> dict[Axis, int]:
    """The place of `rank` on each axis, counted from 0. The expert axis is there if its degree is more than 1."""
    found = _places(axes, rank, expert_layers=False)
    if axes.expert > 1:
        found[Axis.EXPERT] = _places(axes, rank, expert_layers=True)[Axis.EXPERT]
    return found


def group_of(axes: Axes, kind: GroupKind, rank: int) -> tuple[int, ...]:
    """The group of `kind` that `rank` is in, in the order of Megatron-LM."""
    over, expert_layers = GROUP_AXES[kind]
    places = _places(axes, rank, expert_layers=expert_layers)
    inside, first, stride = [0], rank, 1
    for axis, degree in axes.layout(expert_layers=expert_layers):
        if axis in over:
            first -= places[axis] * stride
            inside = [step * stride + other for step in range(degree) for other in inside]
        stride *= degree
    return tuple(first + step for step in inside)


def _places(axes: Axes, rank: int, *, expert_layers: bool) -> dict[Axis, int]:
    found = {}
    for axis, degree in axes.layout(expert_layers=expert_layers):
        rank, found[axis] = divmod(rank, degree)
    return found
