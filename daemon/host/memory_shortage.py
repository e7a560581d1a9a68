"""A process that gets no more memory: it ends, says so, and is started again. That is no bug of Muster.

Python raises MemoryError if an allocation is refused, by a limit of the process (RLIMIT_AS) or of the machine
(vm.overcommit_memory). A memory cgroup refuses nothing: there the kernel kills the process, and systemd, or Slurm for a
job, says so.
"""

from __future__ import annotations

import os

EXIT_MEMORY = 71
"""EX_OSERR: the host refuses what the process needs. Another start may succeed."""


def describe(error: MemoryError) -> str:
    """What is wrong, and what would be right."""
    detail = f" ({error})" if str(error) else ""
    return (
        f"memory has run out on {os.uname().nodename}{detail}: find what uses it, or raise the limit of this process "
        "(LimitAS=, ulimit -v, vm.overcommit_memory)"
    )
