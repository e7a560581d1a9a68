"""A planned stop that all ranks make after the same step.

Agents ask their ranks for a stop at slightly different moments. A rank that left a step early would leave the other
ranks waiting in a collective operation. So the ranks agree through the store of their process group:

1. Each rank that was asked increments a counter.
2. When the counter has reached the world size, rank 0 names the step after its present one.
3. Each rank reads that step before it has finished it, because a step needs rank 0's part too.

The store is not used before a stop.
"""

from typing import Any

from muster.checkpoint.training.agreements.process_group import store_for


class PlannedStop:
    """One rank's part in a planned stop."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._last_step: int | None = None

    def is_due(self, asked: bool, step: int) -> bool:
        """Whether the gang stops after the finished `step`. `asked`: this rank's agent has asked for a stop."""
        if not asked:
            return False
        if self._world_size == 1:
            return True
        if self._store is None:
            self._store = store_for("stop")
            self._store.add("heard", 1)
        if self._last_step is None:
            self._agree(step)
        return self._last_step is not None and step >= self._last_step

    def _agree(self, step: int) -> None:
        if self._rank == 0 and self._store.add("heard", 0) == self._world_size:
            self._store.set("step", str(step + 1))
        if self._store.check(["step"]):
            self._last_step = int(self._store.get("step"))
