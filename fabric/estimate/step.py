"""The time of one step: arithmetic, the communication that nothing hides, the bubble, and the update of parameters.
Pure.

One stage needs, for all its micro-batches, its arithmetic and what is exposed of tensor, context, expert and pipeline
traffic. The bubble and unequal stages stretch that. Gradients and sharded parameters come after it, as far as they are
exposed, and the optimizer comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.fabric.cost import pipeline, throughput
from muster.fabric.cost.choice import Algorithm, cheapest
from muster.fabric.cost.hierarchy import Tiers
from muster.fabric.cost.model import Checkpointing, Model, Offload
from muster.fabric.cost.state_bytes import state_bytes
from muster.fabric.estimate.chip import Chip
from muster.fabric.estimate.memory import layer_intermediates
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.estimate.traffic import Hidden, Traffic
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind

Spread = Mapping[GroupKind, Iterable[Tiers]]
"""The ways in which the groups of each kind lie in the fabric. The slowest decides."""


@dataclass(frozen=True, slots=True)
class PricedTraffic:
    """A collective with its time. All times are seconds of one rank in one step, without the bubble."""

    traffic: Traffic
    algorithm: Algorithm
    each: float
    """One call."""
    seconds: float
    """All calls."""
    exposed: float
    """What nothing hides."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of one step in seconds; they add up to `total`."""

    compute: float
    exposed: float
    """Communication that nothing hides, bubble left out."""
    bubble: float
    """Stages wait for others: the pipeline's start and end, and stages with more layers."""
    optimizer: float
    """The update of the parameters, bound by memory, and its way to the host and back with offload."""
    traffic: tuple[PricedTraffic, ...]
    utilization: float
    """Model FLOPs utilization (MFU): what the model needs, over the peak of all GPUs for the whole step."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.bubble + self.optimizer


def step_time(
    model: Model,
    axes: Axes,
    schedule: Schedule,
    chip: Chip,
    traffic: Sequence[Traffic],
    spread: Spread,
    *,
    in_network: bool = False,
) -> StepTime:
    """The time of one step. `in_network`: the switches reduce."""
    compute = compute_time(model, axes, schedule, chip)
    priced = _priced(model, schedule, compute, traffic, spread, in_network=in_network)
    in_stage = sum(one.exposed for one in priced if not _after(one.traffic))
    after = sum(one.exposed for one in priced if _after(one.traffic))
    stretch = pipeline.stretch(axes.pipeline, schedule.micro_batches, schedule.virtual_stages)
    stretch *= pipeline.imbalance(model.layers, axes.pipeline, schedule.virtual_stages)
    optimizer = _update(model, axes, chip)
    total = (compute + in_stage) * stretch + after + optimizer
    needed = throughput.token_flop(model) * model.tokens
    return StepTime(
        compute=compute,
        exposed=in_stage + after,
        bubble=(compute + in_stage) * (stretch - 1),
        optimizer=optimizer,
        traffic=priced,
        utilization=needed / (total * axes.world_size * chip.peak),
    )


def compute_time(model: Model, axes: Axes, schedule: Schedule, chip: Chip) -> float:
    """Seconds of one GPU's own work in a step: matrix products at the chip's efficiency, all else at memory bandwidth.

    A layer's intermediate results measure its other operations (normalization, activation functions, residual sums):
    each byte is written and read in a forward pass, and in a backward pass read, with the gradient that comes in and
    the one that goes out.
    """
    products = throughput.computed_flop(model) * model.tokens / (axes.world_size * chip.peak * chip.efficiency)
    passes = 2 if model.activation_checkpointing is Checkpointing.FULL else 1
    intermediates = layer_intermediates(model, axes, schedule, scores=not model.fused_attention)
    layers = model.layers / axes.pipeline * schedule.micro_batches
    return products + layers * (2 * passes + 3) * intermediates / chip.memory_bandwidth


def _after(traffic: Traffic) -> bool:
    """Whether it comes once in a step, around the pipeline and not inside."""
    return traffic.hidden in (Hidden.BACKWARD, Hidden.FORWARD)


def _priced(
    model: Model, schedule: Schedule, compute: float, traffic: Sequence[Traffic], spread: Spread, *, in_network: bool
) -> tuple[PricedTraffic, ...]:
    """Each traffic with its time. What hides one of them is no longer there for the next."""
    free = {hidden: _cover(hidden, model, schedule, compute) for hidden in Hidden}
    found = []
    for one in traffic:
        choices = [cheapest(one.kind, tiers, one.size, in_network=in_network) for tiers in spread[one.group]]
        slowest = max(choices, key=lambda choice: choice.seconds)
        seconds = slowest.seconds * one.times
        exposed = _exposed(one, slowest.seconds, free[one.hidden])
        free[one.hidden] -= seconds - exposed
        found.append(PricedTraffic(one, slowest.algorithm, slowest.seconds, seconds, exposed))
    return tuple(found)


def _exposed(traffic: Traffic, each: float, cover: float) -> float:
    """Seconds of all calls that `cover` seconds of arithmetic don't hide. The first or the last call is always seen."""
    if traffic.hidden is Hidden.NOTHING:
        return each * traffic.times
    if _after(traffic):
        return exposed_buckets(traffic.times, each, cover)
    return max(each * traffic.times - cover, each)


def _cover(hidden: Hidden, model: Model, schedule: Schedule, compute: float) -> float:
    """Seconds of arithmetic that run meanwhile."""
    forward = 1 / 4 if model.activation_checkpointing is Checkpointing.FULL else 1 / 3
    match hidden:
        case Hidden.NOTHING:
            return 0.0
        case Hidden.ATTENTION:
            attention = throughput.attention_flop(model) / throughput.token_flop(model)
            return compute * attention
        case Hidden.LAYERS:
            return compute
        case Hidden.BACKWARD:
            return compute / schedule.micro_batches * (1 - forward)
        case Hidden.FORWARD:
            return compute / schedule.micro_batches * forward


def exposed_buckets(number: int, each: float, cover: float) -> float:
    """Seconds that buckets of gradients still need when the backward pass has ended.

    Bucket i of K is ready after i/K of the pass, T. Sent one after another, each in c seconds, the last one ends at
    max(T + c, T/K + Kc).
    """
    return max(each, cover / number + number * each - cover)


def _update(model: Model, axes: Axes, chip: Chip) -> float:
    """Reads gradients, reads and writes the optimizer's state, writes parameters. Each rank updates its share."""
    each = state_bytes(model)
    owned = model.dense_parameters / (axes.tensor * axes.pipeline)
    experts = model.expert_parameters / (axes.tensor * axes.pipeline * axes.expert)
    if model.sharding.stage:
        owned, experts = owned / (axes.data * axes.context), experts / axes.expert_data
    if model.offload is Offload.NONE:
        return (owned + experts) * (each.gradient + 2 * each.optimizer + each.parameter) / chip.memory_bandwidth
    return (owned + experts) * (each.gradient + each.parameter) / chip.host_link
