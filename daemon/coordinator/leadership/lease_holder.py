"""Who holds the lease: a process, named so that a later one of the same machine can tell that it is gone."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A process, as another one of the same kernel can tell whether it still runs."""

    host: str
    kernel: str
    """Boot id and pid namespace."""
    pid: int
    started: int
    """Clock ticks from boot to its start."""

    @classmethod
    def of_this_process(cls) -> Incumbent:
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), f"{boot}/{namespace}", os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> Incumbent | None:
        """The inverse of `str`."""
        host, _, rest = text.partition("|")
        parts = rest.split("|")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(host, parts[0], int(parts[1]), int(parts[2]))

    def has_ended(self, seen_by: Incumbent, proc: Path = PROC) -> bool:
        """Whether `seen_by` knows that this process is gone; False where it can't know."""
        if (self.host, self.kernel) != (seen_by.host, seen_by.kernel):
            return False
        started = _started(self.pid, proc)
        return not _is_there(self.pid) if started is None else started != self.started

    def __str__(self) -> str:
        return f"{self.host}|{self.kernel}|{self.pid}|{self.started}"


def _started(pid: int, proc: Path = PROC) -> int | None:
    """None where there is no such process, or others' are hidden (hidepid, ProtectProc)."""
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
