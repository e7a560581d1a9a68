"""Bytes of state for each parameter, and the GPUs that hold it. Pure.

Source: Rajbhandari and others, "ZeRO" (2020), section 3.1: mixed-precision Adam keeps 16 bytes for each parameter: 2
for the parameter, 2 for its gradient, and 12 for the fp32 copy, momentum and variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.fabric.cost.model import Model, Optimizer, Precision

_OPTIMIZER_BYTES = {
    Optimizer.ADAM: 8,  # momentum and variance in fp32
    Optimizer.ADAMW: 8,
    Optimizer.MOMENTUM: 4,
    Optimizer.SGD: 0,
}
_FP32 = 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes for each parameter."""

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes for each parameter, of all states together."""
        return self.parameter + self.gradient + self.optimizer


def state_bytes(model: Model) -> StateBytes:
    """Bytes for each parameter. Formats below fp32 keep an fp32 copy of the parameter with the optimizer."""
    full = model.precision in (Precision.FP32, Precision.TF32)
    parameter = _FP32 if full else 2
    master = 0 if full else _FP32
    return StateBytes(parameter, model.gradient_bytes or parameter, _OPTIMIZER_BYTES[model.optimizer] + master)


def gpus_for_state(parameters: float, bytes_each: float, gpu_memory: float) -> int:
    """The smallest number of GPUs that holds the state alone, divided evenly: ⌈bytes · N / memory⌉."""
    return math.ceil(parameters * bytes_each / gpu_memory)
