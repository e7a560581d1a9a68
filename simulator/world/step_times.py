"""The step times that ranks measure: how long each one computes, and how long it waits for the others.

They are measured from the first slow rank of a run on. A node may be slow, with all ranks on it, or one rank of a gang,
wherever it runs.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.checkpoint.store.block_times import StepBlocks
from muster.daemon.coordinator.core.state.events import BlockTimes
from muster.v1.rank_pb2 import StepTime

if TYPE_CHECKING:
    from muster.simulator.environment.schedule import Schedule
    from muster.simulator.world.agent import Rank

STEP_US, SLOWER_BY, JITTER = 400_000, 0.3, 0.01
"""A rank's compute time in microseconds; by how much longer a slow rank computes; by how much each step differs."""


class StepTimes:
    """Who is slow, and what the ranks measure. `seed`: the jitter has a random generator of its own."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self._schedule = schedule
        self._rng = random.Random(f"step times {seed}")
        self._slow_nodes: dict[str, float] = {}
        self._slow_ranks: dict[tuple[str, int], float] = {}
        self._over: set[str | tuple[str, int]] = set()
        self._scripted: dict[tuple[str, int], float] = {}

    def slow_down(self, what: str | tuple[str, int]) -> None:
        """A node, or a rank of a gang, is slow from now on."""
        if isinstance(what, str):
            self._slow_nodes.setdefault(what, self._schedule.now)
        else:
            self._slow_ranks.setdefault(what, self._schedule.now)

    def script(self, gang: str, rank: int) -> None:
        """A scenario reports itself that the rank of the gang is slow from now on. The ranks measure nothing."""
        self._scripted.setdefault((gang, rank), self._schedule.now)

    def keep_pace(self, what: str | tuple[str, int]) -> None:
        """The node or the rank is slow no longer."""
        self._over.add(what)

    def slow_since(self, gang: str, rank: int, node: str) -> float | None:
        """Since when the rank of the gang was slow on this node, whether it still is or not. None: it never was."""
        key = (gang, rank)
        since = [self._slow_ranks.get(key), self._slow_nodes.get(node), self._scripted.get(key)]
        return min((moment for moment in since if moment is not None), default=None)

    def measure(self, step: int, ranks: Collection[Rank]) -> None:
        """All `ranks` of a generation have finished a step."""
        if not self._slow_nodes and not self._slow_ranks:
            return
        compute_us = {rank.rank: self._compute_us(rank) for rank in ranks}
        longest = max(compute_us.values())
        for rank in ranks:
            spent = compute_us[rank.rank]
            rank.step_blocks.add(StepTime(step=step, compute_us=spent, wait_us=longest - spent))

    def _compute_us(self, rank: Rank) -> int:
        key, machine = (rank.agent.identity.gang, rank.rank), rank.agent.machine
        slow = (self._slow_nodes.keys() - self._over) & {machine.name} or (self._slow_ranks.keys() - self._over) & {key}
        machine.has_slow_rank = machine.has_slow_rank or bool(slow)
        return int(STEP_US * (1 + SLOWER_BY * bool(slow) + JITTER * self._rng.random()))


def reported(blocks: StepBlocks) -> BlockTimes | None:
    """The blocks as the coordinator reads them; None if there are none."""
    times = blocks.times()
    return times and BlockTimes(times.first_block, tuple(times.compute_us), tuple(times.wait_us))
