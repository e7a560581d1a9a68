"""How much each kind of group sends in one training step, as numbers that are linear in a link's α and 1/β. Pure.

A ring over n ranks takes 2(n−1)(α + B/(nβ)) for an all-reduce of B bytes: 2(n−1) messages, and 2(n−1)B/n bytes on each
link. So a weight is a number of messages and a number of bytes, and its cost on a link is messages · α + bytes / β.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.link import Link


@dataclass(frozen=True, slots=True)
class Weight:
    """What one group sends over each of its links in one step.

    Raises:
        ValueError: a number is negative, or not finite.
    """

    messages: float
    size: float
    """Bytes."""

    def __post_init__(self) -> None:
        """Refuses what no group sends."""
        if not (0 <= self.messages < float("inf") and 0 <= self.size < float("inf")):
            raise ValueError(f"a group sends 0 or more messages and bytes, not {self.messages:g} and {self.size:g}")

    def __add__(self, other: Weight) -> Weight:
        """Both, one after the other."""
        return Weight(self.messages + other.messages, self.size + other.size)

    def seconds(self, link: Link) -> float:
        """The time of one step's traffic, if the group's slowest link is `link`."""
        return self.messages * link.latency + self.size / link.bandwidth


NO_TRAFFIC = Weight(0.0, 0.0)
Weights = Mapping[GroupKind, Weight]


def ring_pass(ranks: int, size: float, calls: float = 1.0) -> Weight:
    """Reduce-scatter, all-gather or all-to-all of `size` bytes over a ring of `ranks`, `calls` times."""
    return Weight(calls * (ranks - 1), calls * (ranks - 1) / ranks * size)


def ring_all_reduce(ranks: int, size: float, calls: float = 1.0) -> Weight:
    """All-reduce of `size` bytes over a ring of `ranks`, `calls` times."""
    return ring_pass(ranks, size, 2 * calls)


def send(size: float, calls: float = 1.0) -> Weight:
    """`size` bytes from one rank to another, `calls` times."""
    return Weight(calls, calls * size)


_PARAMETERS = 70e9
_LAYERS = 80
_ACTIVATION = 4096 * 8192 * 2.0
"""Bytes of one layer's input for one micro-batch: 4,096 tokens, hidden size 8,192, bf16."""
_KEYS_AND_VALUES = 2 * 4096 * 1024 * 2.0
"""Bytes of the keys and values of one layer, with 8 heads of 128."""
_MICRO_BATCHES = 8
_BUCKET = 25e6
"""Bytes that PyTorch averages at once."""
_EXPOSED = 0.5
"""Each layer waits for tensor, context and expert groups, and gradients are averaged beside the backward pass. So data
groups count at most so much of the lightest of those."""


def usual_weights(axes: Axes) -> Weights:
    """The weights of a transformer of 70e9 parameters, for a job that says nothing of its model.

    Forward and backward pass, bf16, nothing sharded or recomputed. What counts for placement is the order of magnitude:
    tensor and expert groups send thousands of times in a step, pipelines and gradients a few times.
    """
    layers = _MICRO_BATCHES * _LAYERS / axes.pipeline
    awaited = {
        GroupKind.TENSOR: ring_all_reduce(axes.tensor, _ACTIVATION / axes.context, 4 * layers),
        GroupKind.CONTEXT: ring_pass(axes.context, _KEYS_AND_VALUES / axes.tensor, 3 * layers),
        GroupKind.EXPERT: ring_pass(axes.expert, _ACTIVATION / axes.context, 4 * layers),
    }
    gradients = 2 * _PARAMETERS / (axes.tensor * axes.pipeline)
    buckets = max(1.0, gradients / _BUCKET)
    data = ring_all_reduce(axes.data * axes.context, gradients / buckets, buckets)
    experts = ring_all_reduce(axes.expert_data, gradients / buckets, buckets) if axes.expert > 1 else NO_TRAFFIC
    return MappingProxyType(
        {
            **awaited,
            GroupKind.PIPELINE: send(_ACTIVATION / axes.context, 2 * _MICRO_BATCHES),
            GroupKind.DATA: _exposed(data, awaited.values()),
            GroupKind.EXPERT_DATA: _exposed(experts, awaited.values()),
        }
    )


def _exposed(averaging: Weight, awaited: Iterable[Weight]) -> Weight:
    sending = [weight for weight in awaited if weight.size]
    if not sending:
        return averaging
    return Weight(
        min(averaging.messages, _EXPOSED * min(weight.messages for weight in sending)),
        min(averaging.size, _EXPOSED * min(weight.size for weight in sending)),
    )
