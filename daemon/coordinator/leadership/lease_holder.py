"""The process that holds the lease. Another process of the same kernel can tell whether the holder has ended."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A process, identified so that a reused process id is not taken for the same process."""

    host: str
    kernel_id: str
    """Boot id and pid namespace."""
    pid: int
    start_ticks: int
    """Clock ticks from boot to the start of the process."""

    @classmethod
    def of_this_process(cls) -> LeaseHolder:
        """The identity of the calling process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), f"{boot}/{namespace}", os.getpid(), _read_start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> LeaseHolder | None:
        """The inverse of `str`; None if `text` is not an identity."""
        host, _, rest = text.partition("|")
        parts = rest.split("|")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(host, parts[0], int(parts[1]), int(parts[2]))

    def has_ended(self, observer: LeaseHolder, proc: Path = PROC) -> bool:
        """Whether `observer` knows that this process has ended; False if `observer` can't know."""
        if (self.host, self.kernel_id) != (observer.host, observer.kernel_id):
            return False
        start_ticks = _read_start_ticks(self.pid, proc)
        return not _process_exists(self.pid) if start_ticks is None else start_ticks != self.start_ticks

    def __str__(self) -> str:
        return f"{self.host}|{self.kernel_id}|{self.pid}|{self.start_ticks}"


def _read_start_ticks(pid: int, proc: Path = PROC) -> int | None:
    """None if the process does not exist, or if /proc hides other users' processes (hidepid, ProtectProc)."""
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
