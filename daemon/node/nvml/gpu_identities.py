"""Which GPUs the node has, as the newest answers of the reader tell: index, UUID, PCI address, NVLink domain."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from muster.daemon.node.nvml.nvml_process import GpuReading

_REGISTERED = 3
"""NVML's state of a GPU that belongs to an NVLink fabric."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """One GPU. `device`: the PCI address as in the kernel log, without the function. `nvlink_cluster`: empty if the GPU
    is in no NVLink domain of several nodes."""

    index: int
    device: str
    uuid: str = ""
    nvlink_cluster: str = ""
    nvlink_clique: int = 0


class GpuIdentities:
    """What the sensor has read. One thread notes it, others may ask for it. The log has NVLink domains when they are
    first seen and when they change."""

    def __init__(self) -> None:
        self._known: dict[str, GpuIdentity] = {}

    def current(self) -> tuple[GpuIdentity, ...]:
        """All GPUs, by index."""
        return tuple(sorted(self._known.values(), key=lambda gpu: gpu.index))

    def note(self, gpus: Iterable[GpuReading], count: int) -> None:
        """Take in an answer of the reader. `count`: how many GPUs the driver has. A GPU that could not be read is as it
        was, and so is the domain of one that was read without the slow readings."""
        found = {device: gpu for device, gpu in self._known.items() if gpu.index < count}
        for gpu in gpus:
            if not gpu.device:
                continue
            before = found.get(gpu.device, GpuIdentity(gpu.index, gpu.device))
            cluster, clique = _domain(gpu, before)
            if cluster and (cluster, clique) != (before.nvlink_cluster, before.nvlink_clique):
                _log.info("GPU %d (%s): NVLink fabric %s, clique %d", gpu.index, gpu.uuid, cluster, clique)
            found[gpu.device] = GpuIdentity(gpu.index, gpu.device, gpu.uuid or before.uuid, cluster, clique)
        self._known = found

    def forget(self) -> None:
        """There are no GPUs any more, or the driver is not loaded."""
        self._known = {}


def _domain(gpu: GpuReading, before: GpuIdentity) -> tuple[str, int]:
    """The cluster and the clique. Without a fabric of several nodes, the fabric manager reports an id of zeros."""
    if gpu.fabric is None:
        return before.nvlink_cluster, before.nvlink_clique
    state, _, cluster, clique, _ = gpu.fabric
    return (cluster, clique) if state == _REGISTERED and cluster.strip("0") else ("", 0)
