"""Where devices hang on the PCI bus, as links of /sys show it, and how near two of them are.

The real path of a device names every bridge on the way to it: pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0. Two
devices below the same first bridge hang on one port of the CPU, which has one link: a switch divides it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path

from muster.daemon.node.sysfs.kernel_files import Unreadable, read_text

DEVICES = "sys/bus/pci/devices"
MAX_BRIDGES = 32
"""Bridges on the way to one device, at most; a longer path is believed to be none."""
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NUMA_NODE = re.compile(r"-?[0-9]{1,4}")


class Nearness(IntEnum):
    """How near two devices are. The values are those of the enum in common.proto."""

    SWITCH = 1
    ROOT = 2
    NUMA_NODE = 3
    NODE = 4


@dataclass(frozen=True, slots=True)
class PciPlace:
    """A device on the bus. `path`: the root complex, the bridges, the device itself; empty: not known. `numa_node`:
    None if the firmware does not tell it."""

    address: str
    path: tuple[str, ...] = ()
    numa_node: int | None = None


def place_of(device: Path) -> PciPlace | None:
    """The place of a device, from any link to its folder; None: there is no PCI device."""
    try:
        parts = Path(os.path.realpath(device, strict=True)).parts
    except OSError:
        return None
    roots = [at for at, part in enumerate(parts) if _ROOT.fullmatch(part)]
    path = parts[roots[-1] :] if roots else parts[-1:]
    if not path or not _ADDRESS.fullmatch(path[-1]) or len(path) > MAX_BRIDGES:
        return None
    return PciPlace(path[-1], path if roots else (), _numa_node(device))


def _numa_node(device: Path) -> int | None:
    try:
        text = read_text(device / "numa_node")
    except Unreadable:
        return None
    return int(text) if _NUMA_NODE.fullmatch(text) and int(text) >= 0 else None


def distance(one: PciPlace, other: PciPlace) -> tuple[Nearness, int]:
    """How near two devices are, the nearest first in order. Of those behind one switch, the ones with more bridges in
    common are nearer."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))
    if common > 1:
        return Nearness.SWITCH, -common
    if common:
        return Nearness.ROOT, 0
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Nearness.NUMA_NODE, 0
    return Nearness.NODE, 0
