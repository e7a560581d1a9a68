"""Samples of one GPU, and its counters from one reading to the next."""

from __future__ import annotations

from dataclasses import dataclass

from muster.daemon.node.nvml.nvml_process import GpuReading
from muster.daemon.node.sensors.sensor import Sample

MOST_ERRORS = 1_000_000
"""Errors between two readings; more is a counter that jumps."""
_COUNTER_SLACK = 1.5
"""How much faster than time itself a counter of time may seem to grow: readings are not taken at even distances."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How much a counter grew, and in how many seconds."""

    count: int
    seconds: float

    @property
    def is_plausible(self) -> bool:
        """Whether the counter has not jumped: it was not reset, did not wrap, and did not grow beyond reason."""
        return self.seconds > 0 and 0 <= self.count <= MOST_ERRORS

    @property
    def part_of_time(self) -> float | None:
        """For a counter of nanoseconds: the part of the time in which it grew, 0 to 1; None: it has jumped."""
        passed_ns = self.seconds * 1e9
        if passed_ns <= 0 or not 0 <= self.count <= passed_ns * _COUNTER_SLACK:
            return None
        return min(1.0, self.count / passed_ns)


class Counters:
    """The newest reading of each counter, by device and name."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, str], tuple[int, float]] = {}

    def growth(self, device: str, name: str, value: int | None, now: float) -> Growth | None:
        """How much the counter grew since its reading before; None: there is none, or `value` could not be read."""
        if value is None or not device:
            return None
        before = self._newest.get((device, name))
        self._newest[device, name] = (value, now)
        return Growth(value - before[0], now - before[1]) if before else None

    def errors(self, device: str, name: str, value: int | None, now: float) -> Growth | None:
        """As `growth`, for a counter of errors. None, too, if it has jumped."""
        growth = self.growth(device, name, value, now)
        return growth if growth and growth.is_plausible else None


def gpu_sample(kind: str, code: int, gpu: GpuReading, held: float, now: float, words: str) -> Sample:
    """A sample about this GPU."""
    return Sample(kind, code, gpu.device, float(held), now, f"{describe(gpu)}: {words}")


def describe(gpu: GpuReading) -> str:
    """The GPU and its state in words: "GPU 3 (NVIDIA H100, GPU-4a1c), 91 °C, 350 W"."""
    known = ", ".join(filter(None, (gpu.name, gpu.uuid)))
    parts = [f"GPU {gpu.index}{f' ({known})' if known else ''}"]
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    if gpu.power_mw is not None:
        parts.append(f"{gpu.power_mw / 1000:.0f} W")
    return ", ".join(parts)
