"""What hardware this node has: NUMA nodes, GPUs, network adapters, and which adapter is nearest to which GPU.

The GPUs are those that the NVML sensor has read. Adapters and places on the PCI bus come from files of /sys, which a
thread reads now and then with a deadline. The coordinator gets the whole with hello, and again when it has changed. An
agent on this node asks for it (AskHardware in memory.proto).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host import clock
from muster.daemon.node.nvml.gpu_identities import GpuIdentity
from muster.daemon.node.sysfs.network_adapters import NetworkAdapter, read_adapters, read_numa_nodes
from muster.daemon.node.sysfs.pci_devices import DEVICES, PciPlace, distance, place_of
from muster.daemon.node.sysfs.reader_thread import ReaderThread, ReadHangs
from muster.v1 import common_pb2 as pb
from muster.wording import counted

PERIOD_S = 30.0
"""Seconds between two readings of the files. Adapters change when a driver is loaded, or a link negotiates anew."""
LOOK_S = 1.0
"""Seconds between two looks at the GPUs: these are in memory."""
DEADLINE_S = 3.0
MAX_GPUS = 64
"""GPUs of a node, at most; more are not reported."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostHardware:
    """What files of /sys say. `places`: of GPUs, by their PCI address as in the kernel log."""

    numa_nodes: tuple[int, ...] = ()
    adapters: tuple[NetworkAdapter, ...] = ()
    places: tuple[tuple[str, PciPlace], ...] = ()


class HardwareInventory:
    """Keeps what the node has. `gpus`: those that were read last. `changed` is called after each change.

    `current` may be read in any thread.
    """

    def __init__(
        self,
        root: Path,
        gpus: Callable[[], Sequence[GpuIdentity]],
        changed: Callable[[], None] = lambda: None,
        now: Callable[[], float] = clock.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._root = root
        self._gpus = gpus
        self._changed = changed
        self._now = now
        self._pause = pause
        self._seen: tuple[GpuIdentity, ...] = ()
        self._reader: ReaderThread[HostHardware] = ReaderThread(lambda: read_host(root, self._seen), deadline_s)
        self._read_at = float("-inf")
        self.current = pb.Hardware()
        """What is known now. It is replaced, and never changed."""

    async def run(self) -> None:
        """Look for changes until cancelled."""
        try:
            while True:
                await self.look()
                await self._pause(LOOK_S)
        finally:
            self._reader.close()

    async def look(self) -> None:
        """Read the files if they are due or the GPUs have changed."""
        gpus = tuple(self._gpus())[:MAX_GPUS]
        if gpus == self._seen and self._now() < self._read_at + PERIOD_S:
            return
        self._seen, self._read_at = gpus, self._now()
        try:
            host = await self._reader.read()
        except ReadHangs as hang:
            _log.warning("the places of GPUs and network adapters are not known: /sys: %s", hang)
            return
        found = describe(gpus, host)
        if found != self.current:
            self.current = found
            _log.info("hardware: %s", _words(found))
            self._changed()


def read_host(root: Path, gpus: Iterable[GpuIdentity]) -> HostHardware:
    """What the files below the root folder `root` say. The function of a GPU's address is 0."""
    places = {gpu.device: place_of(root / DEVICES / f"{gpu.device}.0") for gpu in gpus}
    return HostHardware(
        tuple(read_numa_nodes(root)),
        tuple(read_adapters(root)),
        tuple((device, place) for device, place in places.items() if place is not None),
    )


def describe(gpus: Sequence[GpuIdentity], host: HostHardware) -> pb.Hardware:
    """The node as a message. A GPU whose place is not known has no nearest adapter."""
    places = dict(host.places)
    return pb.Hardware(
        numa_nodes=host.numa_nodes,
        gpus=[_gpu(gpu, places.get(gpu.device), host.adapters) for gpu in sorted(gpus, key=lambda gpu: gpu.index)],
        adapters=[_adapter(adapter) for adapter in host.adapters],
    )


def _gpu(gpu: GpuIdentity, place: PciPlace | None, adapters: Sequence[NetworkAdapter]) -> pb.Gpu:
    message = pb.Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=place.address if place else f"{gpu.device}.0",
        numa_node=place.numa_node if place else None,
        nvlink_cluster=gpu.nvlink_cluster,
        nvlink_clique=gpu.nvlink_clique,
    )
    with_rdma = [adapter for adapter in adapters if adapter.infiniband_device]
    if place and with_rdma:
        ways = [(distance(place, adapter.place), adapter) for adapter in with_rdma]
        shortest = min(way for way, _ in ways)
        message.nearest_adapters.extend(adapter.infiniband_device for way, adapter in ways if way == shortest)
        message.nearness = pb.Nearness.ValueType(shortest[0].value)
    return message


def _adapter(adapter: NetworkAdapter) -> pb.Adapter:
    return pb.Adapter(
        name=adapter.name,
        pci_address=adapter.place.address,
        numa_node=adapter.place.numa_node,
        gbit_per_s=adapter.gbit_per_s,
        infiniband_device=adapter.infiniband_device,
        link_layer=adapter.link_layer,
    )


def _words(hardware: pb.Hardware) -> str:
    rdma = sum(bool(adapter.infiniband_device) for adapter in hardware.adapters)
    return (
        f"{counted(len(hardware.numa_nodes), 'NUMA node')}, {counted(len(hardware.gpus), 'GPU')}, "
        f"{counted(len(hardware.adapters), 'network adapter')}, "
        f"{rdma} of them with RDMA"
    )
