"""A planned stop that all ranks make after the same step.

Agents tell their ranks at slightly different moments, and a rank that left a step early would leave the others
waiting in a collective. So: every rank that has heard says so in the group's store. Once all have, rank 0, between
its steps n and n + 1, names step n + 1; whoever finishes that step knows of it, for it needed rank 0's part. Nothing
is asked of the store before a stop.
"""

from typing import Any

import torch.distributed as dist


class Stop:
    """One process's view of a stop."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._step: int | None = None

    def due(self, asked: bool, step: int) -> bool:
        """Whether the gang stops after this `step`, which is finished; `asked`: this rank's agent asks for it."""
        if not asked:
            return False
        if self._world_size == 1:
            return True
        if self._store is None:
            self._store = dist.PrefixStore("muster-stop", dist.distributed_c10d._get_default_store())
            self._store.add("heard", 1)
        if self._step is None:
            self._agree(step)
        return self._step is not None and step >= self._step

    def _agree(self, step: int) -> None:
        if self._rank == 0 and self._store.add("heard", 0) == self._world_size:
            self._store.set("step", str(step + 1))
        if self._store.check(["step"]):
            self._step = int(self._store.get("step"))
