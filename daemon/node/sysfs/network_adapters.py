"""The network adapters of the host and its NUMA nodes, as /sys shows them. Virtual interfaces are none.

What can't be read is left out, or not known. No input makes this module fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.node.sysfs.kernel_files import Unreadable, names, read_text
from muster.daemon.node.sysfs.pci_devices import PciPlace, place_of

INFINIBAND, INTERFACES, NUMA_NODES = "sys/class/infiniband", "sys/class/net", "sys/devices/system/node"
MAX_ADAPTERS, MAX_INTERFACES, MAX_NUMA_NODES, MAX_PORTS = 64, 1024, 256, 8
"""What a node has at most; more is not read. A host of many containers has hundreds of interfaces."""
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,2})?) Gb/sec[ -~]{0,40}")
_SPEED = re.compile(r"[0-9]{1,8}")
_LINK_LAYERS = frozenset({"InfiniBand", "Ethernet"})
"""Of adapters that NCCL's InfiniBand transport uses. Others, as EFA, have a transport of their own."""


@dataclass(frozen=True, slots=True)
class NetworkAdapter:
    """One adapter. `name`: of its network interface; empty: it has none. `gbit_per_s`: as negotiated; 0: not known.

    `infiniband_device` and `link_layer`: empty for an adapter without RDMA.
    """

    place: PciPlace
    name: str = ""
    gbit_per_s: float = 0.0
    infiniband_device: str = ""
    link_layer: str = ""


def read_numa_nodes(root: Path) -> list[int]:
    """The numbers of the NUMA nodes below the root folder `root`."""
    return sorted(int(name.removeprefix("node")) for name in _names(root / NUMA_NODES, r"node[0-9]{1,4}"))[
        :MAX_NUMA_NODES
    ]


def read_adapters(root: Path) -> list[NetworkAdapter]:
    """The adapters below the root folder `root`, those with RDMA first, each group by PCI address."""
    found = sorted(_rdma_adapters(root), key=lambda adapter: (adapter.place.address, adapter.infiniband_device))
    seen = {adapter.place.address for adapter in found}
    others: dict[str, NetworkAdapter] = {}
    for name in _names(root / INTERFACES, r".*")[:MAX_INTERFACES]:
        place = place_of(root / INTERFACES / name / "device")
        if place is not None and place.address not in seen:
            others.setdefault(place.address, NetworkAdapter(place, name, _speed(root / INTERFACES / name)))
    return [*found, *(others[address] for address in sorted(others))][:MAX_ADAPTERS]


def _rdma_adapters(root: Path) -> Iterator[NetworkAdapter]:
    for device in _names(root / INFINIBAND, r".*"):
        folder = root / INFINIBAND / device
        place = place_of(folder / "device")
        ports = [folder / "ports" / port for port in _names(folder / "ports", r"[0-9]{1,3}")[:MAX_PORTS]]
        layers = {layer for port in ports if (layer := _text(port / "link_layer")) in _LINK_LAYERS}
        if place is not None and layers:
            interface = next(iter(_names(folder / "device" / "net", r".*")), "")
            rate = sum(float(rate[1]) for port in ports if (rate := _RATE.fullmatch(_text(port / "rate"))))
            yield NetworkAdapter(place, interface, rate, device, min(layers, key=lambda layer: layer != "InfiniBand"))


def _speed(interface: Path) -> float:
    """In Gb/s. An interface that is down has none."""
    text = _text(interface / "speed")
    return int(text) / 1000 if _SPEED.fullmatch(text) else 0.0


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except Unreadable:
        return ""


def _names(folder: Path, pattern: str) -> list[str]:
    try:
        return names(folder, pattern, MAX_INTERFACES)
    except Unreadable:
        return []
