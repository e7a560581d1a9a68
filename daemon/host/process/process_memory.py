"""The memory of a process: what follows if it gets no more, and how seldom Python looks for what nobody uses.

A process that gets no more memory ends, says so, and is started again. That is no bug of Muster. Python raises
MemoryError if an allocation is refused, by a limit of the process (RLIMIT_AS) or of the machine (vm.overcommit_memory).
A memory cgroup refuses nothing: there the kernel kills the process, and systemd, or Slurm for a job, says so.
"""

from __future__ import annotations

import gc
import os

EXIT_MEMORY = 71
"""EX_OSERR: the host refuses what the process needs. Another start may succeed."""
YOUNG_OBJECTS = 50_000
"""New objects after which the collector looks for cycles; Python's own value is 700. A coordinator has some hundred
objects for each stream, and they live as long as the stream: with 2,000 nodes, a tenth of its processor time went into
looking through them (measured). Few of Muster's objects are in cycles, so little memory waits meanwhile."""


def describe_shortage(error: MemoryError) -> str:
    """What is wrong, and what would be right."""
    detail = f" ({error})" if str(error) else ""
    return (
        f"memory has run out on {os.uname().nodename}{detail}: find what uses it, or raise the limit of this process "
        "(LimitAS=, ulimit -v, vm.overcommit_memory)"
    )


def collect_seldom() -> None:
    """Let the collector run seldom from now on."""
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
