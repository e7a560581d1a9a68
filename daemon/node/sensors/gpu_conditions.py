"""What NVML's readings of the GPUs say: samples of conditions that may be signals.

A reading that failed gives no sample. Neither does a counter that jumps back, as after a reset of the GPU, or one that
grows faster than is possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings
from muster.daemon.node.sensors.sensor import Sample

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
"""Bits of NVML's clock event reasons that say that the GPU is slowed down. They are the codes of `THROTTLE`."""
THROTTLE, VIOLATION, MEMORY, ERROR, HANG, MISSING = (
    *("gpu-throttle", "gpu-violation", "gpu-memory", "nvml-error", "nvml-hang", "gpu-missing"),
)
"""The kinds of signals."""
THERMAL_VIOLATION = 1
"""The code of `VIOLATION`: NVML's performance policy of that number."""
ECC_GREW, REMAP_PENDING, REMAP_FAILED = 1, 2, 3
"""The codes of `MEMORY`."""
GPU_LOST, RESET_REQUIRED = 15, 16
"""NVML's return codes that are the codes of `ERROR`."""
_THROTTLE_WORDS = {
    HW_SLOWDOWN: "hardware slowdown",
    SW_THERMAL: "slowed down by the driver for heat",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
}
_ERROR_WORDS = {GPU_LOST: "the GPU is lost", RESET_REQUIRED: "the GPU requires a reset"}
_COUNTER_SLACK = 1.5
"""How much faster than time itself a counter of time may seem to grow: readings are not taken at even distances."""
_MOST_ECC_ERRORS = 1_000_000
"""Uncorrected errors between two readings; more is a counter that jumps."""


@dataclass(slots=True)
class _Counters:
    """The counters of one GPU at one reading."""

    at: float
    violation_ns: int | None
    ecc: int | None


class GpuConditions:
    """Turns each answer of the reader into samples. Keeps each GPU's counters of the answer before."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}
        self._most_gpus = 0

    def samples(self, readings: GpuReadings, now: float) -> Iterator[Sample]:
        """The samples of one answer. `now`: monotonic seconds."""
        for gpu in readings.gpus:
            yield from self._of_gpu(gpu, now)
        self._most_gpus = max(self._most_gpus, readings.count)
        words = f"{readings.count} GPUs, there were {self._most_gpus}"
        yield Sample(MISSING, 0, "", float(readings.count < self._most_gpus), now, words)

    def _of_gpu(self, gpu: GpuReading, now: float) -> Iterator[Sample]:
        for code, words in _ERROR_WORDS.items():
            yield _sample(ERROR, code, gpu, code in gpu.failed.values(), now, words)
        if gpu.reasons is not None:
            yield from _throttling(gpu, gpu.reasons, now)
        if gpu.remapped is not None:
            *_, pending, failed = gpu.remapped
            yield _sample(MEMORY, REMAP_PENDING, gpu, bool(pending), now, "a row remap is pending")
            yield _sample(MEMORY, REMAP_FAILED, gpu, bool(failed), now, "a row remap has failed")
        if gpu.device:
            before, after = (
                self._counters.get(gpu.device),
                _Counters(now, gpu.thermal_violation_ns, gpu.ecc_uncorrected),
            )
            self._counters[gpu.device] = after
            yield from _growth(gpu, before, after) if before else ()


def _throttling(gpu: GpuReading, reasons: int, now: float) -> Iterator[Sample]:
    if reasons & (HW_THERMAL | HW_POWER_BRAKE):
        reasons &= ~HW_SLOWDOWN  # the driver sets it with those, too: one cause is one signal
    for code, words in _THROTTLE_WORDS.items():
        yield _sample(THROTTLE, code, gpu, bool(reasons & code), now, words)


def _growth(gpu: GpuReading, before: _Counters, after: _Counters) -> Iterator[Sample]:
    passed_ns = (after.at - before.at) * 1e9
    if before.violation_ns is not None and after.violation_ns is not None:
        grown_ns = after.violation_ns - before.violation_ns
        if passed_ns > 0 and 0 <= grown_ns <= passed_ns * _COUNTER_SLACK:
            held, words = min(1.0, grown_ns / passed_ns), "the counter of thermal violations grows"
            yield _sample(VIOLATION, THERMAL_VIOLATION, gpu, held, after.at, words)
    if before.ecc is not None and after.ecc is not None and 0 <= after.ecc - before.ecc <= _MOST_ECC_ERRORS:
        words = f"{after.ecc - before.ecc} new uncorrected memory errors, {after.ecc} since the driver started"
        yield _sample(MEMORY, ECC_GREW, gpu, after.ecc > before.ecc, after.at, words)


def _sample(kind: str, code: int, gpu: GpuReading, held: float, now: float, words: str) -> Sample:
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
