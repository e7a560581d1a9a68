"""Whether other processes wanted the same cores while something was measured.

Slurm can give one core to several jobs, and containers of one machine share its cores. The kernel counts for each
thread how long it was ready and had to wait. Rates that were measured meanwhile say nothing about the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED_ABOVE = 0.05
"""The share of its time that a thread waits for a core at most, if the core is the job's own. On own cores it is below
0.01: only the kernel's own threads come between."""


class ProcessorWait:
    """Counts from its creation."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._ran_ns, self._waited_ns = self._read()

    def is_shared(self) -> bool:
        """Whether the threads of this process had to wait since then. False if the kernel does not count it."""
        ran_ns, waited_ns = self._read()
        ran_ns, waited_ns = ran_ns - self._ran_ns, waited_ns - self._waited_ns
        return waited_ns > SHARED_ABOVE * (ran_ns + waited_ns)

    def _read(self) -> tuple[int, int]:
        """Nanoseconds in which the threads ran, and in which they waited."""
        times = list(_thread_times(self._tasks))
        return sum(ran_ns for ran_ns, _ in times), sum(waited_ns for _, waited_ns in times)


def waited_s(pid: int) -> float:
    """How long a process was ready and had to wait for a core, in seconds: the thread that waited longest. A process
    that is stopped or blocked does not wait. 0 if the kernel does not count it, or the process has ended."""
    return max((waited_ns for _, waited_ns in _thread_times(Path(f"/proc/{pid}/task"))), default=0) / 1e9


def _thread_times(tasks: Path) -> Iterator[tuple[int, int]]:
    """For each thread: nanoseconds in which it ran, and in which it waited."""
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, ValueError):
                ran_ns, waited_ns, _ = (task / "schedstat").read_text().split()
                yield int(ran_ns), int(waited_ns)
