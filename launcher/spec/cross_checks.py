"""Contradictions between the tables of job.toml. Each is one ValueError that says what would be right. Pure."""

from __future__ import annotations

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, fits_in_blocks, rank_groups
from muster.fabric.model.level import Level
from muster.launcher.spec.model import Model
from muster.launcher.spec.parallelism import Parallelism
from muster.launcher.spec.placement import Placement


def check_placement(placement: Placement, axes: Axes, local_ranks: int) -> None:
    """Refuses groups that must be within a node, and are not in a node of `local_ranks` ranks.

    How many nodes an NVLink domain, a leaf or a pod has is known to the fabric, and checked there.
    """
    for kind in (GroupKind.TENSOR, GroupKind.CONTEXT, GroupKind.EXPERT, GroupKind.PIPELINE, GroupKind.DATA):
        packing = placement.packing(kind)
        if packing.level is not Level.NODE or not packing.required or fits_in_blocks(axes, kind, local_ranks):
            continue
        size = len(rank_groups(axes, kind)[0])
        why = f"a group has {size} ranks, and a node has {local_ranks}"
        if size <= local_ranks:
            why += f", but with this order the ranks of a group are on {_spanned_nodes(axes, kind, local_ranks)} nodes"
        raise ValueError(
            f"placement.{kind} = 'require node' can't be: {why}. Choose smaller degrees, another parallelism.order, or "
            f"'prefer node'"
        )


def _spanned_nodes(axes: Axes, kind: GroupKind, local_ranks: int) -> int:
    return max(len({rank // local_ranks for rank in group}) for group in rank_groups(axes, kind))


def check_model(model: Model, split: Parallelism, axes: Axes) -> None:
    """Refuses a model that the degrees can't divide."""
    stages = split.pipeline * split.virtual_stages
    if model.layers and model.layers < stages:
        raise ValueError(
            f"model.layers = {model.layers} can't fill parallelism.pipeline * virtual_stages = {stages} stages: choose "
            f"{model.layers} stages or fewer"
        )
    if model.experts and model.experts % axes.expert:
        raise ValueError(
            f"parallelism.expert = {axes.expert} must divide model.experts = {model.experts}: "
            "each rank holds whole experts"
        )
    _check_divides(split.tensor, "parallelism.tensor", model.hidden_size, "model.hidden_size")
    _check_divides(split.tensor, "parallelism.tensor", model.heads, "model.heads")
    _check_divides(split.context, "parallelism.context", model.sequence_length, "model.sequence_length")
    replicas, written = axes.data * (split.micro_batches or 1), f"parallelism.data = {axes.data}"
    if split.micro_batches:
        written = f"parallelism.data * micro_batches = {axes.data} * {split.micro_batches} = {replicas}"
    if model.global_batch and model.global_batch % replicas:
        near = max(1, round(model.global_batch / replicas)) * replicas
        raise ValueError(f"{written} must divide model.global_batch = {model.global_batch}: for example {near}")


def _check_divides(degree: int, degree_key: str, number: int | None, key: str) -> None:
    if number and number % degree:
        raise ValueError(f"{degree_key} = {degree} must divide {key} = {number}")
