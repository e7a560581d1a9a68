"""What NVML's readings of the GPUs say: samples of conditions that may be signals.

A reading that failed gives no sample: what a GPU does not report is no fault. Neither does a counter that jumps back,
as after a reset of the GPU, or one that grows faster than is possible. `gpu_links` has what connects the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings
from muster.daemon.node.sensors.gpu_links import GpuLinks
from muster.daemon.node.sensors.gpu_samples import Counters, gpu_sample
from muster.daemon.node.sensors.sensor import Sample
from muster.wording import counted

GPU_IDLE = 0x1
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
"""Bits of NVML's clock event reasons that say that the GPU is slowed down. They are the codes of `THROTTLE`."""
THROTTLE, VIOLATION, MEMORY, ERROR, HANG, MISSING, HEAT, RECOVERY = (
    *("gpu-throttle", "gpu-violation", "gpu-memory", "nvml-error", "nvml-hang", "gpu-missing", "gpu-temperature"),
    "gpu-recovery",
)
"""The kinds of signals. The kernel log has `RECOVERY`, too (Xid 154), with the same codes."""
ECC_GREW, REMAP_PENDING, REMAP_FAILED, SRAM_GREW, DRAM_GREW, RETIREMENT_PENDING, SRAM_WORN = 1, 2, 3, 4, 5, 6, 7
"""The codes of `MEMORY`. `ECC_GREW`: an error in neither SRAM nor DRAM, or nobody knows where."""
FEWER_THAN_BEFORE, FEWER_THAN_GRES = 0, 1
"""The codes of `MISSING`."""
RECOVERY_ACTIONS = range(1, 8)
"""NVML's recovery actions: all but "none"."""
_VIOLATIONS = {
    1: ("thermal_violation_ns", "thermal violations"),
    3: ("board_limit_ns", "the board's limit"),
    5: ("reliability_ns", "reliability"),
    0x80: ("power_brake_ns", "power brake"),
}
"""The readings of the codes of `VIOLATION`: NVML's performance policy, or its clock event reason."""
_THROTTLE_WORDS = {
    HW_SLOWDOWN: "hardware slowdown",
    SW_THERMAL: "slowed down by the driver for heat",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
}
_ERROR_WORDS = {
    8: "external power cables are not attached",
    14: "the infoROM is corrupted",
    15: "the GPU is lost",
    16: "the GPU requires a reset",
}
"""NVML's return codes that say what is wrong, whichever reading returns them."""
_FAILURE_WORDS = {10: "no reading succeeds: timeout", 999: "no reading succeeds: unknown error"}
"""NVML's return codes that say something only if nothing of the GPU can be read."""


class GpuConditions:
    """Turns each answer of the reader into samples. Keeps each GPU's counters of the answer before."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._links = GpuLinks(self._counters)
        self._most_gpus = 0

    def samples(self, readings: GpuReadings, now: float, in_gres: int | None = None) -> Iterator[Sample]:
        """The samples of one answer. `now`: monotonic seconds. `in_gres`: how many GPUs Slurm believes that the node
        has; None: not known."""
        for gpu in readings.gpus:
            yield from self._of_gpu(gpu, now)
        self._most_gpus = max(self._most_gpus, readings.count)
        words = f"{counted(readings.count, 'GPU')}, there were {self._most_gpus}"
        yield Sample(MISSING, FEWER_THAN_BEFORE, "", float(readings.count < self._most_gpus), now, words)
        if in_gres is not None and not any(gpu.mig for gpu in readings.gpus):
            words = f"{counted(readings.count, 'GPU')}, Slurm's GRES says {in_gres}"
            yield Sample(MISSING, FEWER_THAN_GRES, "", float(readings.count < in_gres), now, words)

    def _of_gpu(self, gpu: GpuReading, now: float) -> Iterator[Sample]:
        yield from _errors(gpu, now)
        if gpu.reasons is not None:
            yield from _throttling(gpu, gpu.reasons, now)
        yield from _heat(gpu, now)
        yield from self._violations(gpu, now)
        yield from self._memory_errors(gpu, now)
        yield from _memory_repairs(gpu, now)
        if gpu.recovery_action is not None:
            for action in RECOVERY_ACTIONS:
                words = f"the driver asks for recovery action {gpu.recovery_action}"
                yield gpu_sample(RECOVERY, action, gpu, gpu.recovery_action == action, now, words)
        yield from self._links.samples(gpu, now, busy=gpu.reasons is not None and not gpu.reasons & GPU_IDLE)

    def _violations(self, gpu: GpuReading, now: float) -> Iterator[Sample]:
        for code, (reading, cause) in _VIOLATIONS.items():
            growth = self._counters.growth(gpu.device, reading, getattr(gpu, reading), now)
            if growth and (part := growth.part_of_time) is not None:
                yield gpu_sample(VIOLATION, code, gpu, part, now, f"clocks are held down: {cause}")

    def _memory_errors(self, gpu: GpuReading, now: float) -> Iterator[Sample]:
        explained = 0
        for code, name, value in ((SRAM_GREW, "SRAM", gpu.ecc_sram), (DRAM_GREW, "DRAM", gpu.ecc_dram)):
            if grown := self._counters.errors(gpu.device, name, value, now):
                explained += grown.count
                words = f"{grown.count} new uncorrected errors of the {name}, {value} since the driver started"
                yield gpu_sample(MEMORY, code, gpu, grown.count > 0, now, words)
        if grown := self._counters.errors(gpu.device, "ECC", gpu.ecc_uncorrected, now):
            words = f"{grown.count} new uncorrected memory errors, {gpu.ecc_uncorrected} since the driver started"
            yield gpu_sample(MEMORY, ECC_GREW, gpu, grown.count > explained, now, words)


def _errors(gpu: GpuReading, now: float) -> Iterator[Sample]:
    for code, words in _ERROR_WORDS.items():
        yield gpu_sample(ERROR, code, gpu, code in gpu.failed.values(), now, words)
    nothing_read = gpu.reasons is gpu.temperature_c is gpu.power_mw is gpu.ecc_uncorrected is None
    for code, words in _FAILURE_WORDS.items():
        yield gpu_sample(ERROR, code, gpu, nothing_read and code in gpu.failed.values(), now, words)


def _throttling(gpu: GpuReading, reasons: int, now: float) -> Iterator[Sample]:
    if reasons & (HW_THERMAL | HW_POWER_BRAKE):
        reasons &= ~HW_SLOWDOWN  # the driver sets it with those, too: one cause is one signal
    for code, words in _THROTTLE_WORDS.items():
        yield gpu_sample(THROTTLE, code, gpu, bool(reasons & code), now, words)


def _heat(gpu: GpuReading, now: float) -> Iterator[Sample]:
    """A GPU says how far it is from its limit, and where it slows down. One without that (before H100) has a
    temperature of slow-down."""
    if gpu.margin_c is not None and gpu.slowdown_margin_c is not None:
        words = f"{gpu.margin_c} °C to its limit, it slows down at {gpu.slowdown_margin_c}"
        yield gpu_sample(HEAT, 1, gpu, gpu.margin_c < gpu.slowdown_margin_c, now, words)
    elif gpu.temperature_c is not None and gpu.slowdown_c is not None:
        words = f"it slows down at {gpu.slowdown_c} °C"
        yield gpu_sample(HEAT, 1, gpu, gpu.temperature_c >= gpu.slowdown_c, now, words)


def _memory_repairs(gpu: GpuReading, now: float) -> Iterator[Sample]:
    if gpu.remapped is not None:
        *_, pending, failed = gpu.remapped
        yield gpu_sample(MEMORY, REMAP_PENDING, gpu, bool(pending), now, "a row remap is pending")
        yield gpu_sample(MEMORY, REMAP_FAILED, gpu, bool(failed), now, "a row remap has failed")
    if gpu.retirement_pending is not None:
        yield gpu_sample(
            *(MEMORY, RETIREMENT_PENDING, gpu, bool(gpu.retirement_pending), now),
            "a page waits for its retirement",
        )
    if gpu.sram_over_threshold is not None:
        words = "the SRAM has had more errors than NVIDIA's threshold"
        yield gpu_sample(MEMORY, SRAM_WORN, gpu, gpu.sram_over_threshold, now, words)
