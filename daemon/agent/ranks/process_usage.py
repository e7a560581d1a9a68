"""What processes and their descendants have used since they started: CPU time, and bytes that they read and wrote.

One pass over /proc serves any number of processes. It blocks for some milliseconds on a host of a thousand processes.
The kernel counts the bytes of read, write and their kin, on files, pipes and sockets, and the bytes of disks. It does
not count those of send and recv.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BYTE_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")
"""Lines of /proc/PID/io."""
_AT_WORK = ("R", "D")
"""States of /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """A process and its descendants.

    `cpu_s`: seconds of CPU time, with that of children which have ended. `io_bytes`: read and written. `pids`: all
    processes. `at_work`: the main thread of one of them runs or waits for a processor (state R), or is in a wait that
    no signal ends (state D), as in calls to disks and file servers.
    """

    cpu_s: float
    io_bytes: int
    pids: frozenset[int]
    at_work: bool = False


@dataclass(frozen=True, slots=True)
class _Process:
    state: str
    parent: int
    cpu_s: float


def read_usage(roots: Iterable[int], proc: Path = PROC) -> dict[int, TreeUsage]:
    """The usage of each process of `roots` that runs, with its descendants. Blocks."""
    processes = dict(_processes(proc))
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    return {root: _tree_usage(_tree(root, children), processes, proc) for root in roots if root in processes}


def _tree_usage(pids: frozenset[int], processes: Mapping[int, _Process], proc: Path) -> TreeUsage:
    return TreeUsage(
        cpu_s=sum(processes[pid].cpu_s for pid in pids),
        io_bytes=sum(_io_bytes(proc / str(pid)) for pid in pids),
        pids=pids,
        at_work=any(processes[pid].state in _AT_WORK for pid in pids),
    )


def _tree(root: int, children: Mapping[int, list[int]]) -> frozenset[int]:
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return frozenset(found)


def _processes(proc: Path) -> Iterator[tuple[int, _Process]]:
    for name in os.listdir(proc):
        if name.isdigit() and (stat := _read(proc / name / "stat")):
            # The command name stands in parentheses and may contain anything. State and parent follow it.
            fields = stat.rpartition(")")[2].split()
            yield int(name), _Process(fields[0], int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)


def _io_bytes(folder: Path) -> int:
    """0 if the kernel does not count them, or does not show them."""
    lines = (line.partition(":") for line in _read(folder / "io").splitlines())
    return sum(int(value) for name, _, value in lines if name in _BYTE_COUNTERS)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
