"""How long a call and each of its steps may take: a default, one deadline for the whole call, and a leadership lease.

Only the coordinator that holds the lease may change something in Slurm. A step that has begun must end before the lease
ends. The coordinator may be frozen at that time, so a separate timer also ends the step (`run_command.run`, the pyslurm
worker).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from muster.slurm.client.errors import SlurmTimeout

DEFAULT_TIMEOUT_S: Final = 5.0
"""Seconds for a whole call. A healthy slurmctld needs much less."""
LeaseGuard = Callable[[], float]
"""Returns the seconds that a step that begins now may take. If no step may begin, the call does not return: it ends
this process.
"""
BACKSTOP_DELAY_S = 1.0
"""Seconds between this process's own timeout and the separate timer. Normally this process is alive and ends the step
itself. A standby waits longer than this before it takes over (`LeaseTimeouts.takeover_s`).
"""


class Deadline:
    """A point in time of the running event loop, `timeout_s` seconds after the object was made."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout_s
        self.timeout_s = timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._end - self._loop.time()

    def require(self, operation: str) -> float:
        """Returns the seconds that are left for `operation`. Raises SlurmTimeout after the deadline."""
        if (remaining_s := self.remaining_s) <= 0:
            raise SlurmTimeout(f"{operation}: not done within {self.timeout_s:g} s")
        return remaining_s


def no_lease() -> float:
    """The guard of a program that needs no lease: a step may take any time."""
    return math.inf
