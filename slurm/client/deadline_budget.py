"""One deadline for a call that takes several steps."""

from __future__ import annotations

import asyncio

from muster.slurm.client.errors import SlurmTimeout


class Budget:
    """Seconds left until the deadline of the call that is running on this event loop."""

    def __init__(self, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + deadline
        self.deadline = deadline

    @property
    def left(self) -> float:
        """Seconds left; negative when they are used up."""
        return self._end - self._loop.time()

    def need(self, what: str) -> float:
        """Seconds left to `what`; raises SlurmTimeout when there are none."""
        if (left := self.left) <= 0:
            raise SlurmTimeout(f"{what}: not done within {self.deadline:g} s")
        return left
