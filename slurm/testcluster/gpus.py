"""The GPUs that a node pretends to have, and their faults: the control file of the stand-in for NVIDIA's library.

A node has no GPU until a fault gives it some. `nvml_stand_in.c` describes the file.
"""

from __future__ import annotations

from typing import Protocol

from muster.slurm.image.engine import EngineError, Outcome
from muster.slurm.image.nvml_stand_in import CONTROL_SUFFIX, LIBRARY, ControlFile, healthy_gpu

NVML_CONTROL = f"/usr/local/lib/{LIBRARY}{CONTROL_SUFFIX}"
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
