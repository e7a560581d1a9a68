"""How long a call may take: the default, and one deadline for a call that takes several steps."""

from __future__ import annotations

import asyncio
from typing import Final

from muster.slurm.client.errors import SlurmTimeout

DEFAULT_TIMEOUT_S: Final = 5.0
"""Seconds for a whole call. A healthy slurmctld needs much less."""


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
