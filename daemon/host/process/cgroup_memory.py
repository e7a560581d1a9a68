"""How much memory this process may still allocate: the least of what the node and each enclosing cgroup allow.

Slurm, containers and systemd set such limits. Whoever goes beyond one is killed, not refused; beyond memory.high of
version 2, which Slurm sets to what the job asked for, the kernel lets it hardly run. Both versions of cgroups are read;
the memory controller is in one of them. A container may show its own limit at the root of what it sees, and a path of
the host that it doesn't see: so the root counts, and folders that are not there don't.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLeft:
    """Bytes that may still be allocated, what sets that limit, in words, and of how many bytes they are left."""

    bytes: int
    limit: str
    of_bytes: int = 0


@dataclass(frozen=True)
class _Version:
    """The files of one version of cgroups. `limits`: the narrowest of them counts. `cache`, `shared`: in memory.stat,
    all files in memory, and those of them that the kernel can't drop. `kills`: the file with how many processes were
    killed for want of memory.
    """

    limits: tuple[str, ...]
    used: str
    cache: str
    shared: str
    kills: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_cache", "total_shmem", "memory.oom_control")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "file", "shmem", "memory.events")


def memory_left(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryLeft | None:
    """What this process may still allocate; None if not even the node's memory is known."""
    return min(_all_limits(proc, cgroup), key=lambda one: one.bytes, default=None)


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryLeft | None:
    """The narrowest limit, whatever is in use of it; None if not even the node's memory is known."""
    return min(_all_limits(proc, cgroup), key=lambda one: one.of_bytes, default=None)


def processes_killed(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """How many processes of this process's cgroup the kernel has killed so far for want of memory, in whatever cgroup
    or on the whole node it was used up."""
    count = 0
    for version, root, group in _groups(proc / "self/cgroup", cgroup):
        with suppress(OSError, KeyError, ValueError):  # there is no memory controller here
            lines = (root / group.lstrip("/") / version.kills).read_text().splitlines()
            count += int(dict(line.split() for line in lines)["oom_kill"])
    return count


def _all_limits(proc: Path, cgroup: Path) -> Iterator[MemoryLeft]:
    node = _node_bytes(proc / "meminfo")
    if "MemAvailable" not in node:
        return
    yield MemoryLeft(node["MemAvailable"], "the node's memory", node.get("MemTotal", 0))
    for version, root, group in _groups(proc / "self/cgroup", cgroup):
        yield from _limits(version, root, root / group.lstrip("/"))


def _groups(listing: Path, cgroup: Path) -> Iterator[tuple[_Version, Path, str]]:
    """The version, the root folder and the path of each cgroup of this process that may limit its memory."""
    try:
        lines = [line.split(":", 2) for line in listing.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, group in (line for line in lines if len(line) == 3):
        if number == "0" and not controllers:
            yield _V2, cgroup, group
        elif "memory" in controllers.split(","):
            yield _V1, cgroup / "memory", group


def _limits(version: _Version, root: Path, folder: Path) -> Iterator[MemoryLeft]:
    """The limits of a cgroup and of those around it."""
    while root in (folder, *folder.parents):
        try:
            limits = [text for name in version.limits if (text := (folder / name).read_text().strip()) != "max"]
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limits:
                # Its page cache counts as free, because the kernel can drop it.
                used = int((folder / version.used).read_text()) - int(stat[version.cache]) + int(stat[version.shared])
                limit = min(map(int, limits))
                yield MemoryLeft(max(0, limit - used), f"the memory limit of the cgroup {folder}", limit)
        except (OSError, KeyError, ValueError):
            pass  # no limit here: the folder is not there, or the memory controller is not on
        folder = folder.parent


def _node_bytes(meminfo: Path) -> dict[str, int]:
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
