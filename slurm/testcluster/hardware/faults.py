"""Faults of the hardware that a node pretends to have: its GPUs, its network adapter and its memory.

GPUs are in the control file of the stand-in for NVIDIA's library, which `nvml_stand_in.c` describes. A node has none
until a fault gives it some. Adapter and memory are files in the place of /sys. `healthy-host.sh` makes them when the
node boots, and musterd reads them (`--host-root`).
"""

from __future__ import annotations

from typing import Protocol

from muster.slurm.image.engine import EngineError, Outcome
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, LIBRARY, ControlFile, healthy_gpu

NVML_CONTROL = f"/usr/local/lib/{LIBRARY}{CONTROL_SUFFIX}"
HOST_ROOT = "/run/cluster/host"
_PORT = f"{HOST_ROOT}/sys/class/infiniband/mlx5_0/ports/1"
_MEMORY = f"{HOST_ROOT}/sys/devices/system/edac/mc/mc0"
_PUT = 'put() { printf "%s\\n" "$2" >"$1.$$" && mv "$1.$$" "$1"; }; add() { put "$1" $(($(cat "$1") + 1)); };'
_LINK_DOWN = f'{_PUT} add "$1/counters/link_downed"; put "$1/phys_state" "2: Polling"; put "$1/state" "1: DOWN"'
_LINK_UP = f'{_PUT} put "$1/phys_state" "5: LinkUp"; put "$1/state" "4: ACTIVE"'
_MEMORY_ERROR = f'{_PUT} add "$1/ue_count"'
_NO_MEMORY_ERROR = f'{_PUT} put "$1/ue_count" 0'
THROTTLING = {
    "reasons": "0x48",  # hardware slowdown, for heat
    "violation 1": "0 1.0",
    "temperature": "93",
    "margin": "-3",
    "power": "240000",
}
"""What a GPU reports that its hardware slows down because it is too hot."""


def with_memory_error(gpu: dict[str, str]) -> dict[str, str]:
    """The GPU with one more uncorrected error of its DRAM, for which a row remap is pending."""
    more = {key: str(int(gpu.get(key, "0")) + 1) for key in ("ecc 1 0", "memory 2")}
    return gpu | more | {"remapped": "0 1 1 0"}


# Puts stdin in place, and prints when.
_WRITE = 'cat >"$1.new" && date +%s.%N && mv "$1.new" "$1"'


class Hosts(Protocol):
    """Runs commands on the hosts of a cluster (cluster.Cluster)."""

    def exec(self, host: str, *command: str, stdin: bytes | None = None, check: bool = True) -> Outcome: ...


def read_gpus(hosts: Hosts, node: str, at_least: int) -> ControlFile:
    """The GPUs that the node has; `at_least` so many healthy ones if it has fewer.

    Raises:
        EngineError: the image has no stand-in for NVIDIA's library.
    """
    if hosts.exec(node, "test", "-e", NVML_CONTROL.removesuffix(CONTROL_SUFFIX), check=False).rc:
        raise EngineError(f"the image has no {LIBRARY}: install gcc on this host, and start the cluster again")
    text = hosts.exec(node, "cat", NVML_CONTROL, check=False).stdout
    file = ControlFile.parse(text) if text else ControlFile.of_healthy_gpus(0)
    file.gpus += [healthy_gpu(index) for index in range(len(file.gpus), at_least)]
    return file


def write_gpus(hosts: Hosts, node: str, file: ControlFile) -> float:
    """Gives the node these GPUs. Returns the wall-clock time of it."""
    return float(hosts.exec(node, "sh", "-c", _WRITE, "write", NVML_CONTROL, stdin=file.render().encode()).stdout)


def mend_gpus(hosts: Hosts, node: str) -> None:
    """Undoes all faults of the node's GPUs."""
    text = hosts.exec(node, "cat", NVML_CONTROL, check=False).stdout
    if text:
        write_gpus(hosts, node, ControlFile.of_healthy_gpus(len(ControlFile.parse(text).gpus)))


def set_link(hosts: Hosts, node: str, *, up: bool) -> float:
    """Lets the node's InfiniBand port go down, or come up again. Returns the wall-clock time of it."""
    return _run_in(hosts, node, _LINK_UP if up else _LINK_DOWN, _PORT)


def set_memory_error(hosts: Hosts, node: str, *, clear: bool) -> float:
    """Counts one more uncorrectable error of the node's memory, or sets the count to 0. Returns the wall-clock time."""
    return _run_in(hosts, node, _NO_MEMORY_ERROR if clear else _MEMORY_ERROR, _MEMORY)


def mend_adapter_and_memory(hosts: Hosts, node: str) -> bool:
    """Undoes all faults of the node's network adapter and memory.

    False: the node boots at this moment, and has removed the folder before it makes the files itself. Try again.
    """
    return hosts.exec(node, "bash", "/cluster/healthy-host.sh", HOST_ROOT, check=False).rc == 0


def _run_in(hosts: Hosts, node: str, script: str, folder: str) -> float:
    return float(hosts.exec(node, "sh", "-c", f"{script} && date +%s.%N", "fault", folder).stdout)
