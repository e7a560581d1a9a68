"""What a node has: processors, memory, GPUs. Absent hardware is no error."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from muster.daemon.host.process.cgroup_memory import memory_left

_GIB = 1 << 30
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def describe(gpus: Sequence[str], root: Path = Path("/"), driver: str = "") -> str:
    """The inventory in one line, for example "8 x NVIDIA H100 80GB HBM3, AMD EPYC 9654, 192 processors, 1500 GiB".

    `gpus`: the names of the GPUs. `root`: where /proc is. `driver`: the version of the GPUs' driver; empty: unknown.
    """
    parts = [f"{count} x {name}" for name, count in sorted(Counter(gpus).items())]
    parts += [f"driver {driver}"] if driver else []
    info = _read(root / "proc/cpuinfo")
    models = {line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")}
    processors = sum(line.startswith("processor") for line in info.splitlines()) or os.cpu_count() or 1
    parts += [*sorted(models), f"{processors} processors"]
    if memory := _memory_bytes(root):
        parts.append(f"{float(f'{memory / _GIB:.2g}'):.0f} GiB")  # like nodes differ by some megabytes
    return ", ".join(parts)


def describe_node(root: Path = Path("/")) -> str:
    """The inventory as the kernel tells it to every user, with the models of NVIDIA's GPUs and their driver."""
    driver = root / "proc/driver/nvidia"
    gpus = [found[1] for file in sorted(driver.glob("gpus/*/information")) if (found := _MODEL.search(_read(file)))]
    version = _DRIVER.search(_read(driver / "version"))
    return describe(gpus, root, version[1] if version else "")


def driver_gpus(root: Path = Path("/")) -> int:
    """How many GPUs NVIDIA's driver has; 0 without the driver."""
    try:
        return len(os.listdir(root / "proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still use, in bytes: of the node, and of the job's cgroups. 0 if unknown."""
    left = memory_left(root / "proc", root / "sys/fs/cgroup")
    return left.bytes if left else 0


def _memory_bytes(root: Path) -> int:
    return _meminfo(root).get("MemTotal", 0)


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
