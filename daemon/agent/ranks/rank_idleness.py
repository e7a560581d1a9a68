"""For how long the processes of each rank have been idle, for jobs that want idle gangs to be found.

A rank is idle in an interval if its process and all descendants used no more than a trace of CPU time, read and wrote
no byte, are the same processes as before, and wait neither for a processor nor for a disk. So a rank that waits in a
loop is active, and so is one that prints a line. The core decides what follows.

Intervals are counted, not seconds of a clock: time in which the whole node stood still, or Slurm had suspended the job,
is at most one interval. A shared disk that hangs blocks nothing here, because only /proc is read.

The measure is strict, because a restart is a strong answer. Rejected: a limit for GPUs, because they show full use
while NCCL waits; and a limit for each rank alone, because a rank may have nothing to do for hours while another one
writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from muster.daemon.agent.ranks.process_usage import TreeUsage, read_usage
from muster.daemon.host.worker_threads import WorkerThreads

QUARTERS = 4
"""Intervals in the time that a gang may be idle. A hang is found within 5/4 of that time."""
CPU_TRACE = 0.01
"""CPU time of an idle rank, in parts of one core. A thread that wakes up ten times a second, as NCCL's watchdog does,
needs less. A rank that computes needs more in any interval."""

RankKey = tuple[int, int]
"""Number and generation of a rank."""


class RankIdleness:
    """The ranks of one node.

    Args:
        hang_after_idle_s: as in the job (JobSpec), in seconds; 0: nothing is measured.
        pids: the running ranks, with the pid of each.
        on_change: called when `reported` returns something new.
    """

    def __init__(
        self, hang_after_idle_s: float, pids: Callable[[], Mapping[RankKey, int]], on_change: Callable[[], None]
    ) -> None:
        self._interval_s = hang_after_idle_s / QUARTERS
        self._pids = pids
        self._on_change = on_change
        self._usage: dict[RankKey, TreeUsage] = {}
        self._quarters: dict[RankKey, int] = {}

    async def run(self) -> None:
        """Measure until cancelled. Returns at once if the job does not want it."""
        threads = WorkerThreads(1)
        try:
            while self._interval_s:
                await asyncio.sleep(self._interval_s)
                pids = dict(self._pids())
                usage = await threads(read_usage, set(pids.values()))
                self.note({rank: usage[pid] for rank, pid in pids.items() if pid in usage}, self._interval_s)
        finally:
            self._quarters = {}  # ranks that nobody measures are not idle
            threads.close()

    def note(self, usage: Mapping[RankKey, TreeUsage], interval_s: float) -> None:
        """An interval has passed, and the ranks have used so much since they started."""
        quarters = {
            rank: self._quarters[rank] + 1 if is_idle(self._usage[rank], after, interval_s) else 0
            for rank, after in usage.items()
            if rank in self._usage
        }
        before, self._usage = self._quarters, dict(usage)
        self._quarters = dict.fromkeys(usage, 0) | quarters
        if self._quarters != before:
            self._on_change()

    def reported(self) -> dict[RankKey, int]:
        """The number of intervals in a row, up to the last one, in which each rank was idle."""
        return self._quarters


def is_idle(before: TreeUsage, after: TreeUsage, interval_s: float) -> bool:
    """A rank was idle between two measurements."""
    same = before.pids == after.pids and before.io_bytes == after.io_bytes and not after.at_work
    return same and after.cpu_s - before.cpu_s <= CPU_TRACE * interval_s
