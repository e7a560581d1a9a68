"""Losses and gradient norms that are no finite numbers. They are reported as just that: most come from the training."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from muster.checkpoint.training.states.inner_tensors import local_tensor


def not_finite(values: Mapping[str, Any]) -> str:
    """The values that are NaN or infinite, in words; empty if there are none.

    Reading a tensor of a GPU waits for the GPU, so call this only when the GPU was waited for anyway.

    Args:
        values: numbers or tensors by name; None: not given.
    """
    numbers = {name: _number(value) for name, value in values.items() if value is not None}
    return ", ".join(f"{name} = {number}" for name, number in numbers.items() if not math.isfinite(number))


def _number(value: Any) -> float:
    if not isinstance(value, torch.Tensor):
        return float(value)
    local = local_tensor(value.detach())  # the whole of a DTensor would take a collective call
    if local.numel() == 1:
        return float(local)
    return float(local.abs().max()) if local.numel() else 0.0
