"""Sockets, GPUs and network adapters of a pretended host, where they hang on the PCI bus, and the files that say so.

The paths are those of a real /sys: a device's folder lies below those of the bridges on the way to it, and other
folders have links to it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster.slurm.image.nvml_stand_in import ControlFile, healthy_gpu

_DEVICES = "sys/devices"
_COUNTERS = (
    *("counters/link_downed", "counters/symbol_error", "counters/link_error_recovery", "counters/port_rcv_errors"),
    *("counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors"),
    *("counters/port_xmit_discards", "hw_counters/local_ack_timeout_err", "hw_counters/roce_slow_restart"),
)


@dataclass(frozen=True)
class PretendedHost:
    """A host. All tuples have an entry for each GPU, or for each adapter.

    gpu_sockets: the socket of each GPU. gpu_switches: the PCI switch of each GPU. adapter_sockets, adapter_switches:
    likewise; a switch of -1: the adapter hangs on a port of its own. link_layer: of all adapters. cluster, clique: the
    NVLink domain of several nodes; empty: none. interfaces: plain network interfaces, without RDMA.
    """

    gpu_sockets: tuple[int, ...] = ()
    gpu_switches: tuple[int, ...] = ()
    adapter_sockets: tuple[int, ...] = ()
    adapter_switches: tuple[int, ...] = ()
    link_layer: str = "InfiniBand"
    cluster: str = ""
    clique: int = 0
    interfaces: tuple[str, ...] = ()

    def control_file(self) -> ControlFile:
        """What the stand-in for NVIDIA's library reports."""
        domain = {"fabric": f"3 0 {self.cluster or '0' * 32} {self.clique} 0"}
        return ControlFile([healthy_gpu(index) | domain for index in range(len(self.gpu_sockets))])

    def files(self) -> dict[str, str]:
        """The text of each file below the host's root. A link has its target after "-> "."""
        found: dict[str, str] = {}
        for socket in {0, *self.gpu_sockets, *self.adapter_sockets}:
            found[f"{_DEVICES}/system/node/node{socket}/cpulist"] = f"{8 * socket}-{8 * socket + 7}"
        for index, (socket, switch) in enumerate(zip(self.gpu_sockets, self.gpu_switches, strict=True)):
            found |= _pci_device(gpu_address(index), socket, switch, index)
        for index, (socket, switch) in enumerate(zip(self.adapter_sockets, self.adapter_switches, strict=True)):
            found |= _pci_device(adapter_address(index), socket, switch, 16 + index)
            found |= dict(self._infiniband(index, socket, switch))
        for index, name in enumerate(self.interfaces):
            address = f"0000:f{index}:00.0"
            found |= _pci_device(address, 0, -1, 64 + index)
            found[f"sys/class/net/{name}/device"] = f"-> ../../../../{_folder(address, 0, -1, 64 + index)}"
            found[f"sys/class/net/{name}/speed"] = "10000"
        return found

    def _infiniband(self, index: int, socket: int, switch: int) -> Iterator[tuple[str, str]]:
        name, device = f"mlx5_{index}", _folder(adapter_address(index), socket, switch, 16 + index)
        root = f"sys/class/infiniband/{name}"
        yield f"{root}/device", f"-> ../../../../{device}"
        yield f"{device}/net/ib{index}/speed", "400000"
        yield f"{root}/board_id", "MT_0000000838"
        port = {"link_layer": self.link_layer, "rate": "400 Gb/sec (4X NDR)", "phys_state": "5: LinkUp"}
        for file, text in {**port, "state": "4: ACTIVE", **dict.fromkeys(_COUNTERS, "0")}.items():
            yield f"{root}/ports/1/{file}", text


EIGHT_GPUS = PretendedHost(
    gpu_sockets=(0, 0, 0, 0, 1, 1, 1, 1),
    gpu_switches=(0, 0, 1, 1, 2, 2, 3, 3),
    adapter_sockets=(0, 0, 1, 1, 0),
    adapter_switches=(0, 1, 2, 3, -1),
    interfaces=("eno1",),
)
"""Two sockets, an adapter for each two GPUs, and one more adapter that is near no GPU, for storage."""
CROSSED = PretendedHost(
    gpu_sockets=(0, 1, 0, 1), gpu_switches=(0, 1, 0, 1), adapter_sockets=(0, 1, 0), adapter_switches=(0, 1, -1)
)
"""Four GPUs whose order on the PCI bus changes from socket to socket."""


HOSTS = {"eight": EIGHT_GPUS, "crossed": CROSSED}
"""Hosts by the name that the cluster tool gives them."""


def gpu_address(index: int) -> str:
    """Of GPU number `index`, as the stand-in for NVIDIA's library has it."""
    return healthy_gpu(index)["pci"].lower()[4:]


def adapter_address(index: int) -> str:
    """Of adapter number `index`."""
    return f"0000:{0x18 + 0x10 * index:02x}:00.0"


def tar_of(files: Mapping[str, str]) -> bytes:
    """An archive of the files and links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            if text.startswith("-> "):
                info.type, info.linkname = tarfile.SYMTYPE, text.removeprefix("-> ")
                archive.addfile(info)
            else:
                data = f"{text}\n".encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _folder(address: str, socket: int, switch: int, number: int) -> str:
    """The folder of a device: below a port of its own, or below a port with a switch. `number`: of the device."""
    bus = f"{0x80 * socket:02x}"
    root = f"{_DEVICES}/pci0000:{bus}"
    if switch < 0:
        return f"{root}/0000:{bus}:{number % 32:02x}.1/{address}"
    upper = f"0000:{0xC0 + switch:02x}:00.0"
    lower = f"0000:{0xD0 + switch:02x}:{number % 32:02x}.0"
    return f"{root}/0000:{bus}:{switch + 1:02x}.0/{upper}/{lower}/{address}"


def _pci_device(address: str, socket: int, switch: int, number: int) -> dict[str, str]:
    folder = _folder(address, socket, switch, number)
    return {f"{folder}/numa_node": str(socket), f"sys/bus/pci/devices/{address}": f"-> ../../../../{folder}"}
