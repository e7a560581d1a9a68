"""How a step runs: micro-batches, virtual stages, sequence parallelism, buckets of gradients. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from muster.fabric.cost.model import Model
from muster.fabric.groups.axes import Axes

DDP_BUCKET = 25 * 2.0**20
"""Bytes: `bucket_cap_mb` of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How each replica runs one step.

    Raises:
        ValueError: a number is not positive.
    """

    micro_batch: int = 1
    """Sequences of one micro-batch."""
    micro_batches: int = 1
    """Micro-batches of each replica in one step."""
    virtual_stages: int = 1
    """Chunks of layers on each rank of a pipeline; more than 1 is the interleaved schedule."""
    sequence: bool = False
    """Whether the tensor group divides the sequence between the matrix products, too."""
    bucket: float = DDP_BUCKET
    """Bytes of gradients that are sent together."""

    def __post_init__(self) -> None:
        if not min(self.micro_batch, self.micro_batches, self.virtual_stages, self.bucket) > 0:
            raise ValueError("micro_batch, micro_batches, virtual_stages and bucket must be more than 0")


def usual_schedule(
    model: Model,
    axes: Axes,
    micro_batches: int | None = None,
    virtual_stages: int = 1,
    *,
    sequence: bool = False,
    bucket: float = DDP_BUCKET,
) -> Schedule:
    """The schedule of a global batch. Without `micro_batches`, each micro-batch has one sequence.

    Raises:
        ValueError: the replicas can't divide the global batch so.
    """
    number = micro_batches or max(1, model.global_batch // axes.data)
    if model.global_batch % (axes.data * number):
        by = f"data * micro_batches = {axes.data} * {number}" if micro_batches else f"data = {axes.data}"
        raise ValueError(f"global_batch = {model.global_batch} must be a multiple of {by}")
    size = model.global_batch // (axes.data * number)
    return Schedule(size, number, virtual_stages, sequence, bucket)
