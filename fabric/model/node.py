"""One node: its accelerators and network adapters, in which order ranks take them, and what it fails together with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from muster.fabric.model.link import Link

GPU_LINK = Link(1e-6, 300e9)
"""Between two GPUs of a node, until a site says otherwise: NVLink 3 (A100) has 300 GB/s in each direction."""


class FailureDomain(Enum):
    """What takes several nodes down at once."""

    NODE = "node"
    LEAF = "leaf"
    RACK = "rack"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class Nic:
    """A network adapter: a rail of the node."""

    name: str
    """As `NCCL_IB_HCA` writes it: "mlx5_0"."""
    gpus: tuple[int, ...] = ()
    """Indexes of the GPUs for which no other adapter is nearer, in the order of nvidia-smi. Empty if nobody knows."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is known of one node beside its place in the network. All but the name may be unknown."""

    name: str
    gpus: int = 0
    """Number of GPUs; 0 if the node has none, or if nobody knows."""
    sockets: tuple[int, ...] = ()
    """The CPU socket of each GPU, by GPU index. Empty if nobody knows."""
    nics: tuple[Nic, ...] = ()
    gpu_link: Link = GPU_LINK
    """Between two GPUs of this node."""
    uplink: Link | None = None
    """The node's link to its switch, if it was measured or has negotiated down. None: as the tier's link."""
    rack: str = ""
    """Name of the rack; empty if nobody knows."""
    power_feed: str = ""
    """Name of the power feed; empty if nobody knows."""


@lru_cache(maxsize=65_536)  # all nodes of a large site: they are sorted often
def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which n2 comes before n10. Numbers may have any length."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple(_number(part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def _number(digits: str) -> tuple[int, int, str]:
    # Of two numbers without leading zeros, the one with more digits is larger. Python refuses to read very long ones.
    digits = digits.lstrip("0")
    return 0, len(digits), digits


def gpu_order(node: Node) -> tuple[int, ...]:
    """The GPUs of the node, in the order in which local ranks take them, for CUDA_VISIBLE_DEVICES.

    GPUs of one socket are neighbours, and so are GPUs that share their nearest adapter: ranks that communicate most
    have neighbouring numbers. Empty if the number of GPUs is not known.
    """
    adapters = {gpu: at for at, nic in reversed(list(enumerate(node.nics))) for gpu in nic.gpus}
    sockets = node.sockets if len(node.sockets) == node.gpus else (0,) * node.gpus
    return tuple(sorted(range(node.gpus), key=lambda gpu: (sockets[gpu], adapters.get(gpu, len(node.nics)), gpu)))


def nearest_nics(node: Node, gpu: int) -> tuple[str, ...]:
    """The adapters that are nearest to a GPU, for NCCL_IB_HCA. Empty if nobody knows."""
    return tuple(nic.name for nic in node.nics if gpu in nic.gpus)
