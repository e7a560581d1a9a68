"""The collectives of one training step: which group, what kind, how many bytes, how often, and what hides them. Pure.

`size` has the meaning of `collectives`: the whole buffer of one rank. `times` counts what one rank of the largest
pipeline stage does in one step. b sequences in a micro-batch, s tokens, h hidden size, m micro-batches, L/p layers of
a stage, v virtual stages, t tensor, c context, a bytes of an activation.

Sources: Shoeybi and others, "Megatron-LM" (2019), section 3: tensor. Narayanan and others, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (2021), 2.2 and 3.2: pipeline. Korthikanti and others,
"Reducing Activation Recomputation" (2022), 4.2.2: sequence. Rajbhandari and others, "ZeRO" (2020), section 7:
sharding. Liu and others, "Ring Attention" (2023): context. Lepikhin and others, "GShard" (2020), 3.2: experts. Li and
others, "PyTorch Distributed" (2020), 3.2: buckets of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from muster.fabric.cost.choice import Collective
from muster.fabric.cost.model import Checkpointing, Model, Sharding
from muster.fabric.cost.state_bytes import state_bytes
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.placement.weights import NO_TRAFFIC, Weight, Weights, ring_all_reduce, ring_pass, send


class Hidden(StrEnum):
    """What runs on the GPU meanwhile."""

    NOTHING = "nothing"
    ATTENTION = "attention"
    """The attention of the blocks that are already there (ring attention)."""
    LAYERS = "layers"
    """The layer before: parameters are gathered one layer ahead."""
    BACKWARD = "backward pass"
    """The backward pass of the last micro-batch, bucket by bucket."""
    FORWARD = "forward pass"
    """The forward pass of the first micro-batch, bucket by bucket."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective of one step."""

    group: GroupKind
    kind: Collective
    ranks: int
    size: float
    """Bytes of one call."""
    times: int
    """Calls of one rank in one step."""
    hidden: Hidden
    why: str
    """What it is for, in words."""

    @property
    def total(self) -> float:
        """Bytes of the buffers of all calls of one rank in one step."""
        return self.size * self.times


def step_traffic(model: Model, axes: Axes, schedule: Schedule) -> tuple[Traffic, ...]:
    """All collectives of one step. Groups of one rank have none.

    Left out: the tied embedding of the first and the last stage, norms and losses, which are below a percent of the
    rest.
    """
    every = (
        *_tensor(model, axes, schedule),
        *_context(model, axes, schedule),
        *_expert(model, axes, schedule),
        *_pipeline(model, axes, schedule),
        *_gradients(model, axes, schedule),
    )
    return tuple(one for one in every if one.ranks > 1 and one.size > 0)


def _activation(model: Model, axes: Axes, schedule: Schedule) -> float:
    """Bytes of one layer's input for one micro-batch on one rank: a·b·s·h/c."""
    tokens = schedule.micro_batch * model.sequence_length / axes.context
    return model.element_bytes * tokens * model.hidden_size


def _layers(model: Model, axes: Axes) -> int:
    return math.ceil(model.layers / axes.pipeline)


def _passes(model: Model) -> int:
    """How often the forward pass of a layer runs."""
    return 2 if model.activation_checkpointing is Checkpointing.FULL else 1


def _tensor(model: Model, axes: Axes, schedule: Schedule) -> Iterator[Traffic]:
    size = _activation(model, axes, schedule)
    calls = schedule.micro_batches * _layers(model, axes)
    each = 2 * (_passes(model) + 1)
    if not schedule.sequence:
        why = "after attention and feed-forward, forward and backward"
        yield Traffic(GroupKind.TENSOR, Collective.ALL_REDUCE, axes.tensor, size, each * calls, Hidden.NOTHING, why)
        return
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        why = "around attention and feed-forward, forward and backward"
        yield Traffic(GroupKind.TENSOR, kind, axes.tensor, size, each * calls, Hidden.NOTHING, why)
    why = "inputs again for the gradients of weights"
    yield Traffic(GroupKind.TENSOR, Collective.ALL_GATHER, axes.tensor, size, 2 * calls, Hidden.LAYERS, why)


def _context(model: Model, axes: Axes, schedule: Schedule) -> Iterator[Traffic]:
    """Keys and values go round the ring in each pass, their gradients in the backward pass."""
    tokens = schedule.micro_batch * model.sequence_length
    size = 2 * model.element_bytes * tokens * model.key_value_size / axes.tensor
    calls = schedule.micro_batches * _layers(model, axes)
    gathers = (_passes(model) + 1) * calls
    yield Traffic(
        GroupKind.CONTEXT, Collective.ALL_GATHER, axes.context, size, gathers, Hidden.ATTENTION, "keys and values"
    )
    why = "gradients of keys and values"
    yield Traffic(GroupKind.CONTEXT, Collective.REDUCE_SCATTER, axes.context, size, calls, Hidden.ATTENTION, why)


def _expert(model: Model, axes: Axes, schedule: Schedule) -> Iterator[Traffic]:
    """Tokens go to their experts and back. Each layer is taken to have experts."""
    if model.experts < 2:
        return
    divided = axes.tensor if schedule.sequence else 1
    size = _activation(model, axes, schedule) * model.experts_per_token / divided
    calls = 2 * (_passes(model) + 1) * schedule.micro_batches * _layers(model, axes)
    why = "tokens to experts and back, forward and backward"
    yield Traffic(GroupKind.EXPERT, Collective.ALL_TO_ALL, axes.expert, size, calls, Hidden.NOTHING, why)


def _pipeline(model: Model, axes: Axes, schedule: Schedule) -> Iterator[Traffic]:
    size = _activation(model, axes, schedule) / (axes.tensor if schedule.sequence else 1)
    calls = 2 * schedule.micro_batches * schedule.virtual_stages
    hidden = Hidden.LAYERS if schedule.virtual_stages > 1 else Hidden.NOTHING
    why = "activations to the next stage, gradients to the one before"
    yield Traffic(GroupKind.PIPELINE, Collective.SEND, axes.pipeline, size, calls, hidden, why)


def _gradients(model: Model, axes: Axes, schedule: Schedule) -> Iterator[Traffic]:
    """Dense layers and experts apart: they are copied to different groups."""
    share = axes.tensor * axes.pipeline
    dense, experts = model.dense_parameters / share, model.expert_parameters / (share * axes.expert)
    yield from _replicas(GroupKind.DATA, axes.data * axes.context, dense, model, axes, schedule)
    yield from _replicas(GroupKind.EXPERT_DATA, axes.expert_data, experts, model, axes, schedule)


def _replicas(
    group: GroupKind, ranks: int, parameters: float, model: Model, axes: Axes, schedule: Schedule
) -> Iterator[Traffic]:
    each = state_bytes(model)
    if model.sharding is Sharding.PARAMETERS:
        layers = _layers(model, axes)
        calls = layers * schedule.micro_batches
        why = "parameters of each layer, forward and backward"
        size = parameters * each.parameter / layers
        gathers = (_passes(model) + 1) * calls
        yield Traffic(group, Collective.ALL_GATHER, ranks, size, gathers, Hidden.LAYERS, why)
        size = parameters * each.gradient / layers
        yield Traffic(group, Collective.REDUCE_SCATTER, ranks, size, calls, Hidden.LAYERS, "gradients of each layer")
        return
    size, calls = _buckets(parameters * each.gradient, schedule.bucket)
    if model.sharding is Sharding.NONE:
        yield Traffic(group, Collective.ALL_REDUCE, ranks, size, calls, Hidden.BACKWARD, "gradients")
        return
    yield Traffic(group, Collective.REDUCE_SCATTER, ranks, size, calls, Hidden.BACKWARD, "gradients")
    size, calls = _buckets(parameters * each.parameter, schedule.bucket)
    yield Traffic(group, Collective.ALL_GATHER, ranks, size, calls, Hidden.FORWARD, "parameters after the update")


def _buckets(total: float, bucket: float) -> tuple[float, int]:
    """Bytes of one bucket, and how many there are."""
    number = max(1, math.ceil(total / bucket))
    return total / number, number


def placement_weights(traffic: Iterable[Traffic]) -> Weights:
    """The weights of a model's groups: all collectives of one kind of group together. What hides them is left out.

    Placement compares rings: an all-to-all counts as one, as it does there.
    """
    found: dict[GroupKind, Weight] = {}
    for one in traffic:
        found[one.group] = found.get(one.group, NO_TRAFFIC) + _weight(one)
    return found


def _weight(traffic: Traffic) -> Weight:
    match traffic.kind:
        case Collective.ALL_REDUCE:
            return ring_all_reduce(traffic.ranks, traffic.size, traffic.times)
        case Collective.SEND:
            return send(traffic.size, traffic.times)
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return ring_pass(traffic.ranks, traffic.size, traffic.times)
