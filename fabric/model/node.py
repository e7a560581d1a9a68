"""One node: its accelerators, its network adapters, and what it fails together with."""

from __future__ import annotations

from dataclasses import dataclass

from muster.fabric.model.link import Link

GPU_LINK = Link(1e-6, 300e9)
"""Between two GPUs of a node, until a site says otherwise: NVLink 3 (A100) has 300 GB/s in each direction."""


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
