"""The file with the rank map: the node of each rank, one line a rank, in the order of ranks, as SLURM_HOSTFILE has it.

It is in this agent's memory, and has a path below /proc: shared storage may hang, and a file on the node's disk would
outlive an agent that is killed. Each generation writes it anew, before its ranks start here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

log = logging.getLogger(__name__)


class HostFile:
    """The file of one agent. It exists from the first `write` on until `close`, or the agent's end."""

    def __init__(self) -> None:
        self._fd = -1

    def write(self, nodes: Iterable[str]) -> str:
        """Replace the content. `nodes`: the node of each rank. Returns the path; empty if there is no memory for it."""
        try:
            if self._fd < 0:
                self._fd = os.memfd_create("muster-hostfile", os.MFD_CLOEXEC)
            os.truncate(self._fd, 0)
            with open(f"/proc/self/fd/{self._fd}", "w", encoding="utf-8") as file:
                file.writelines(f"{node}\n" for node in nodes)
        except OSError as error:
            log.warning("the ranks get no MUSTER_HOSTFILE: %s", error)
            return ""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
