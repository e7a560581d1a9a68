"""What was read last of each GPU, for those who ask musterd: error counters (NVLink, PCIe replays, ECC), which the node
check notes before and after each run; and how much of it is used, for the view of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.daemon.node.nvml.nvml_process import GpuReading
from muster.v1.memory_pb2 import GpuCounters as Message
from muster.v1.memory_pb2 import GpuUse

_LINK_COUNTERS = ("NVLink replays", "NVLink recoveries", "NVLink CRC errors", "NVLink failed recoveries")


class GpuCounters:
    """What the sensor has read last. One thread notes it, others ask for it."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, dict[str, int]]] = {}
        self._use: dict[str, GpuUse] = {}

    def note(self, gpus: Iterable[GpuReading], now: float) -> None:
        """Take in an answer of the reader. `now`: monotonic seconds. Slow readings come in some answers only."""
        whole = {gpu.device: (now, dict(_counters(gpu))) for gpu in gpus if gpu.whole and gpu.device}
        self._newest = {**self._newest, **whole}
        self._use = {**self._use, **{gpu.device: use for gpu in gpus if gpu.device and (use := _use(gpu)) is not None}}

    def forget(self) -> None:
        """There are no GPUs any more, or the driver does not answer."""
        self._newest, self._use = {}, {}

    def use(self) -> list[GpuUse]:
        """How much of each GPU is used, of those that say it."""
        return list(self._use.values())

    def message(self, now: float) -> Message:
        """The counters, and the age of the oldest reading; without GPUs there are none."""
        newest = self._newest
        message = Message(age_s=now - min(at for at, _ in newest.values()) if newest else 0.0)
        for device, (_, values) in sorted(newest.items()):
            message.gpus.add(device=device, values=values)
        return message


def _use(gpu: GpuReading) -> GpuUse | None:
    if gpu.memory is None or gpu.busy_percent is None:
        return None
    used, total = gpu.memory
    return GpuUse(index=gpu.index, used_bytes=used, total_bytes=total, busy_percent=gpu.busy_percent)


def _counters(gpu: GpuReading) -> Iterator[tuple[str, int]]:
    """Counters by name, those of all NVLinks together. What the GPU does not report is left out."""
    for place, name in enumerate(_LINK_COUNTERS, start=1):
        values = [value for link in gpu.links or () if (value := link[place]) is not None]
        if values:
            yield name, sum(values)
    for name, value in (
        ("PCIe replays", gpu.pcie_replays),
        ("ECC errors", gpu.ecc_uncorrected),
        ("ECC errors in DRAM", gpu.ecc_dram),
        ("ECC errors in SRAM", gpu.ecc_sram),
    ):
        if value is not None:
            yield name, value
