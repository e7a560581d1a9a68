"""The message `Hardware` as the fabric's model: what one node reports of itself. Pure."""

from __future__ import annotations

from muster.fabric.model.node import Nic, Node
from muster.fabric.sources.node_reports import NodeReport
from muster.v1.common_pb2 import Hardware

MAX_GPUS = MAX_ADAPTERS = 64
"""Of one node. More are an error."""
MAX_NUMA_NODES = 1024
MAX_GBIT_PER_S = 1e6
"""Of an adapter. 0: not known."""
MAX_NAME_CHARS = 64
"""Of a UUID, a PCI address, an adapter, a cluster's id."""


class InvalidHardware(ValueError):
    """A report that no node has. The message says which part, and what would be right."""


def report_of(hardware: Hardware) -> NodeReport:
    """What the fabric needs of the report.

    Raises:
        InvalidHardware: see there.
    """
    _check(hardware)
    count = max((gpu.index + 1 for gpu in hardware.gpus), default=0)
    sockets = {gpu.index: gpu.numa_node for gpu in hardware.gpus if gpu.HasField("numa_node")}
    near: dict[str, dict[int, None]] = {}
    for gpu in hardware.gpus:
        for name in gpu.nearest_adapters:
            near.setdefault(name, {})[gpu.index] = None
    nics = [adapter.infiniband_device for adapter in hardware.adapters if adapter.infiniband_device]
    return NodeReport(
        count,
        tuple(sockets[index] for index in range(count)) if len(sockets) == count else (),
        tuple(Nic(name, tuple(near.get(name, ()))) for name in nics),
        nvlink_domain_of(hardware),
        adapter_bandwidth_of(hardware),
    )


def node_of(name: str, hardware: Hardware) -> Node:
    """The node `name` with this hardware. Raises InvalidHardware."""
    report = report_of(hardware)
    return Node(name, gpus=report.gpus, sockets=report.sockets, nics=report.nics)


def nvlink_domain_of(hardware: Hardware) -> str:
    """The name of the NVLink domain that all GPUs are in; empty: there is none, or they are in several."""
    domains = {f"{gpu.nvlink_cluster}.{gpu.nvlink_clique}" if gpu.nvlink_cluster else "" for gpu in hardware.gpus}
    return next(iter(domains)) if len(domains) == 1 else ""


def adapter_bandwidth_of(hardware: Hardware) -> float:
    """Bytes a second, in one direction, of the slowest adapter that is nearest to a GPU; 0: not known."""
    near = {name for gpu in hardware.gpus for name in gpu.nearest_adapters}
    rates = [one.gbit_per_s for one in hardware.adapters if one.infiniband_device in near and one.gbit_per_s]
    return min(rates, default=0.0) * 1e9 / 8


def _check(hardware: Hardware) -> None:
    limits = (
        ("GPUs", len(hardware.gpus), MAX_GPUS),
        ("network adapters", len(hardware.adapters), MAX_ADAPTERS),
        ("NUMA nodes", len(hardware.numa_nodes), MAX_NUMA_NODES),
    )
    for what, count, most in limits:
        if count > most:
            raise InvalidHardware(f"the report names {count} {what}: a node has {most} at most")
    indexes = [gpu.index for gpu in hardware.gpus]
    if len(set(indexes)) != len(indexes) or max(indexes, default=0) >= MAX_GPUS:
        raise InvalidHardware(f"the report's GPUs must have different indexes below {MAX_GPUS}")
    for gpu in hardware.gpus:
        if len(gpu.nearest_adapters) > MAX_ADAPTERS:
            raise InvalidHardware(f"GPU {gpu.index} has {len(gpu.nearest_adapters)} nearest adapters: too many")
        for word in (gpu.uuid, gpu.pci_address, gpu.nvlink_cluster, *gpu.nearest_adapters):
            _check_word(word)
    for adapter in hardware.adapters:
        if not 0 <= adapter.gbit_per_s <= MAX_GBIT_PER_S:
            raise InvalidHardware(f"an adapter of {adapter.gbit_per_s:g} Gb/s: choose 0 to {MAX_GBIT_PER_S:g}")
        for word in (adapter.name, adapter.pci_address, adapter.infiniband_device, adapter.link_layer):
            _check_word(word)


def _check_word(word: str) -> None:
    """A name goes into environments, orders and output."""
    if len(word) > MAX_NAME_CHARS or not all("!" <= char <= "~" and char not in "=,^\"'" for char in word):
        raise InvalidHardware(
            f"{word[:MAX_NAME_CHARS]!r} in the report is no name of hardware: at most {MAX_NAME_CHARS} letters, digits "
            "and signs, without spaces, quotes and = , ^"
        )
