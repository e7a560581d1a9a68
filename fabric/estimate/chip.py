"""What the model needs to know of one GPU, in the precision of the job. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from muster.fabric.cost.accelerators import Accelerator
from muster.fabric.cost.model import Precision

USUAL_EFFICIENCY = 0.55
"""Share of the peak that matrix products reach, for accelerators whose entry has none: the H100's."""
HOST_LINK = 55e9
"""Bytes a second between a GPU and its host's memory, each way: PCIe 5.0 x16 less its protocol. An assumption."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU.

    Raises:
        ValueError: a number is not positive, or the efficiency is above 1.
    """

    peak: float
    """FLOP/s of dense matrix products in the precision of the job."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    efficiency: float = USUAL_EFFICIENCY
    host_link: float = HOST_LINK

    def __post_init__(self) -> None:
        if not min(self.peak, self.memory, self.memory_bandwidth, self.efficiency, self.host_link) > 0:
            raise ValueError("peak, memory, memory_bandwidth, efficiency and host_link must be more than 0")
        if self.efficiency > 1:
            raise ValueError(f"an efficiency of {self.efficiency:g}: a GPU reaches at most 1, its peak")


def chip_of(entry: Accelerator, precision: Precision, efficiency: float | None) -> Chip:
    """The GPU of an entry of the table. `efficiency`: the site's own figure.

    Raises:
        AcceleratorError: the table has no peak for this precision.
    """
    return Chip(
        entry.peak(precision), entry.memory, entry.memory_bandwidth, efficiency or entry.efficiency or USUAL_EFFICIENCY
    )
