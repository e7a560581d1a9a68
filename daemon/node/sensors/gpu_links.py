"""What NVML's readings say about a GPU's links: PCIe, NVLink, the NVLink fabric.

A slow PCIe link counts only while the GPU works: an idle one saves power. A GPU may have NVLinks that nobody connected.
Hence only a link that was active before counts as down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.daemon.node.nvml.nvml_process import GpuReading, Link
from muster.daemon.node.sensors.gpu_samples import Counters, gpu_sample
from muster.daemon.node.sensors.sensor import Sample

PCIE, NVLINK, FABRIC = "gpu-pcie", "gpu-nvlink", "gpu-fabric"
"""The kinds of signals."""
REPLAYS, NARROW, SLOW = 1, 2, 3
"""The codes of `PCIE`."""
LINK_DOWN, LINK_RETRIES, CRC_BURST, RECOVERY_FAILED = 1, 2, 3, 4
"""The codes of `NVLINK`."""
NOT_REGISTERED, REGISTERING, DEGRADED_BANDWIDTH, ROUTE_RECOVERY, ROUTE_UNHEALTHY, ACCESS_TIMEOUT = range(1, 7)
"""The codes of `FABRIC`."""
REPLAYS_PER_S = 5.0
"""More PCIe replays than that are no chance: DCGM warns at 62 a minute for 16 lanes of generation 6, and at less for
the older ones."""
CRC_ERRORS_PER_S = 100.0
"""DCGM fails a link at that rate of CRC errors."""
_NOT_STARTED, _IN_PROGRESS, _COMPLETED = 1, 2, 3
_TRUE = 1
"""The value of two bits of the health mask that says that something is wrong; 0: unknown, 2: well."""
_HEALTH_MASK = {
    DEGRADED_BANDWIDTH: (0, "its bandwidth is reduced"),
    ROUTE_RECOVERY: (2, "a route is being recovered"),
    ROUTE_UNHEALTHY: (4, "a route is unhealthy"),
    ACCESS_TIMEOUT: (6, "it recovers from an access that timed out"),
}
"""The first of the two bits of each code, and what it says."""
_COUNTERS = ("replays", "recoveries", "CRC errors", "failed recoveries")


class GpuLinks:
    """Turns readings of links into samples."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._were_active: dict[str, set[int]] = {}

    def samples(self, gpu: GpuReading, now: float, busy: bool) -> Iterator[Sample]:
        """The samples of one GPU. `busy`: it works. `now`: monotonic seconds."""
        replays = self._counters.errors(gpu.device, "PCIe replays", gpu.pcie_replays, now)
        if replays:
            rate = replays.count / replays.seconds
            yield gpu_sample(PCIE, REPLAYS, gpu, rate > REPLAYS_PER_S, now, f"{rate:.0f} PCIe replays a second")
        if gpu.pcie and busy:
            yield from _pcie(gpu, *gpu.pcie, now=now)
        if gpu.links and gpu.device:
            yield from self._nvlinks(gpu, gpu.links, now)
        if gpu.fabric:
            yield from _fabric(gpu, *gpu.fabric, now=now)

    def _nvlinks(self, gpu: GpuReading, links: tuple[Link, ...], now: float) -> Iterator[Sample]:
        active = {number for number, link in enumerate(links) if link[0]}
        were_active = self._were_active.setdefault(gpu.device, set())
        were_active |= active
        down = were_active - active
        yield gpu_sample(NVLINK, LINK_DOWN, gpu, bool(down), now, f"NVLinks that are down: {_numbers(down)}")
        grown = [self._grown(gpu, number, link, now) for number, link in enumerate(links)]
        yield from _link_errors(gpu, grown, now)

    def _grown(self, gpu: GpuReading, number: int, link: Link, now: float) -> dict[str, float]:
        """By how much a second each counter of the link grew."""
        found = {}
        for name, value in zip(_COUNTERS, link[1:], strict=True):
            if growth := self._counters.errors(gpu.device, f"NVLink {number} {name}", value, now):
                found[name] = growth.count / growth.seconds
        return found


def _link_errors(gpu: GpuReading, grown: list[dict[str, float]], now: float) -> Iterator[Sample]:
    checks = (
        (LINK_RETRIES, ("replays", "recoveries"), 0.0, "replays or recoveries"),
        (CRC_BURST, ("CRC errors",), CRC_ERRORS_PER_S, f"more than {CRC_ERRORS_PER_S:g} CRC errors a second"),
        (RECOVERY_FAILED, ("failed recoveries",), 0.0, "a recovery failed"),
    )
    for code, names, most, words in checks:
        if any(name in link for link in grown for name in names):
            bad = [number for number, link in enumerate(grown) if any(link.get(name, 0) > most for name in names)]
            yield gpu_sample(NVLINK, code, gpu, bool(bad), now, f"NVLinks with {words}: {_numbers(bad)}")


def _pcie(gpu: GpuReading, generation: int, most: int, lanes: int, most_lanes: int, now: float) -> Iterator[Sample]:
    words = f"PCIe has {lanes} of {most_lanes} lanes"
    yield gpu_sample(PCIE, NARROW, gpu, 0 < lanes < most_lanes, now, words)
    words = f"PCIe runs at generation {generation} of {most}"
    yield gpu_sample(PCIE, SLOW, gpu, 0 < generation < most, now, words)


def _fabric(
    gpu: GpuReading, state: int, result: int, cluster: str, clique: int, mask: int, now: float
) -> Iterator[Sample]:
    where = f"NVLink fabric {cluster}, clique {clique}"
    if state in (_NOT_STARTED, _IN_PROGRESS, _COMPLETED):
        failed = state == _COMPLETED and result != 0
        yield gpu_sample(FABRIC, NOT_REGISTERED, gpu, failed, now, f"{where}: registration failed (error {result})")
        yield gpu_sample(FABRIC, REGISTERING, gpu, state != _COMPLETED, now, f"{where}: not registered yet")
        for code, (shift, words) in _HEALTH_MASK.items():
            yield gpu_sample(FABRIC, code, gpu, mask >> shift & 3 == _TRUE, now, f"{where}: {words}")


def _numbers(links: Iterable[int]) -> str:
    return " ".join(map(str, sorted(links))) or "none"
