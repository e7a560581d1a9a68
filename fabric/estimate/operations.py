"""The main operations of a layer, and what each waits for: arithmetic or memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.fabric.cost import roofline
from muster.fabric.cost.model import Model
from muster.fabric.estimate.chip import Chip
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.groups.axes import Axes


@dataclass(frozen=True, slots=True)
class Operation:
    """One of a layer's main operations on one GPU."""

    name: str
    intensity: float
    """FLOP for each byte."""
    attained: float
    """FLOP/s at most."""
    bound: roofline.Bound


def layer_operations(model: Model, axes: Axes, schedule: Schedule, chip: Chip) -> tuple[Operation, ...]:
    """The matrix products of a layer's forward pass, and its normalization, on one GPU.

    The feed-forward layer is taken as 4 times the hidden size, as in Megatron-LM's papers. With experts, each product
    is that of one expert with the tokens that come to it, if all experts get equally many.
    """
    tokens, hidden = schedule.micro_batch * model.sequence_length / axes.context, float(model.hidden_size)
    columns = (hidden + 2 * model.key_value_size) / axes.tensor
    rows, width, word = tokens, 4 * hidden / axes.tensor, "feed-forward"
    if model.experts > 1 and model.expert_width:
        rows = max(1.0, tokens * model.experts_per_token * axes.expert / model.experts)
        width, word = max(1.0, model.expert_width / axes.tensor), "expert"
    shapes = (
        ("attention in", tokens, hidden, columns),
        ("attention out", tokens, hidden / axes.tensor, hidden),
        (f"{word} up", rows, hidden, width),
        (f"{word} down", rows, width, hidden),
    )
    products = (
        _operation(name, roofline.product_intensity(many, inner, outer, model.element_bytes), chip)
        for name, many, inner, outer in shapes
    )
    # Reads and writes each element once, and computes about 8 FLOP for it: mean, variance, scale and shift.
    return (*products, _operation("normalization", 8 / (2 * model.element_bytes), chip))


def compute_bound_limits(model: Model, axes: Axes, schedule: Schedule, chip: Chip) -> tuple[int | None, int | None]:
    """The largest tensor degree, and the fewest tokens of a micro-batch, with which all products are compute bound.

    Each with the other as planned. Degrees are powers of two up to the number of heads, tokens powers of two. None: not
    even one rank, or not even 2²⁰ tokens.
    """
    degrees = [2**power for power in range(model.head_count.bit_length()) if 2**power <= model.head_count]
    wide = [degree for degree in degrees if _all_compute(model, replace(axes, tensor=degree), schedule, chip)]
    one = replace(schedule, micro_batch=1)
    few = (
        tokens
        for tokens in (2**power for power in range(21))
        if _all_compute(replace(model, sequence_length=tokens * axes.context), axes, one, chip)
    )
    return max(wide, default=None), next(few, None)


def _all_compute(model: Model, axes: Axes, schedule: Schedule, chip: Chip) -> bool:
    products = layer_operations(model, axes, schedule, chip)[:-1]
    return all(one.bound is roofline.Bound.COMPUTE for one in products)


def _operation(name: str, intensity: float, chip: Chip) -> Operation:
    attained = roofline.attainable(intensity, chip.peak, chip.memory_bandwidth)
    return Operation(name, intensity, attained, roofline.bound(intensity, chip.peak, chip.memory_bandwidth))
