"""The main operations of a layer, and what each waits for: arithmetic or memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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

    The feed-forward layer is taken as 4 times the hidden size, as in Megatron-LM's papers.
    """
    tokens, hidden = schedule.micro_batch * model.sequence_length / axes.context, model.hidden_size
    columns = (hidden + 2 * model.key_value_size) / axes.tensor
    shapes = (
        ("attention in", hidden, columns),
        ("attention out", hidden / axes.tensor, hidden),
        ("feed-forward up", hidden, 4 * hidden / axes.tensor),
        ("feed-forward down", 4 * hidden / axes.tensor, hidden),
    )
    products = (
        _operation(name, roofline.product_intensity(tokens, inner, outer, model.element_bytes), chip)
        for name, inner, outer in shapes
    )
    # Reads and writes each element once, and computes about 8 FLOP for it: mean, variance, scale and shift.
    return (*products, _operation("normalization", 8 / (2 * model.element_bytes), chip))


def _operation(name: str, intensity: float, chip: Chip) -> Operation:
    attained = roofline.attainable(intensity, chip.peak, chip.memory_bandwidth)
    return Operation(name, intensity, attained, roofline.bound(intensity, chip.peak, chip.memory_bandwidth))
