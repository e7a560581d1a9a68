"""Step times of a synchronous gang that never ran: noise with tails, drift, and nodes that are slow in turn.

Each rank waits for the slowest one. The blocks are those that agents report, so the straggler detector judges them as
it does those of a job. `bench_stragglers` and the unit tests use them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from muster.checkpoint.store.block_times import STEPS_PER_BLOCK
from muster.daemon.coordinator.core.detection.straggler_evidence import follow
from muster.daemon.coordinator.core.state.block_times import BlockTime, RankPaces

STEP_US, SLOWER = 50_000, 1.3
SPIKES, SPIKE = 0.02, 10.0
"""How many steps have a heavy tail, as a part, and how many times longer they take."""
DRIFT, DRIFT_STEPS = 0.03, 4000
"""By how much the pace of each rank swings, as a share, and in how many steps. All ranks together swing by a half."""
TURN_STEPS, TURN_FACTOR = (20, 60), (1.2, 1.6)
"""For how many steps a node in turn is slow, and how many times longer its ranks compute then: drawn for each turn.
Each round has every node once, in an order of its own, and no node twice in a row."""


@dataclass(frozen=True)
class VirtualGang:
    """A gang. `noise`: the standard deviation of the time of a step, as a share of its mean; of each rank and step.

    `slow_ranks` compute 30 % longer from `slow_from` on, a step. `troubled`: with tails, drift and turns.
    `pause_steps`: the mean time between two turns, which is distributed exponentially.
    """

    ranks: int
    ranks_per_node: int
    noise: float
    slow_ranks: tuple[int, ...] = ()
    slow_from: int = 0
    troubled: bool = False
    pause_steps: float = 0.0

    def named(self, seed: int, steps: int) -> Iterator[tuple[int, frozenset[int]]]:
        """After each block: how many steps are over, and who is a straggler now."""
        paces = RankPaces()
        for number, block in enumerate(self._blocks(random.Random(seed), steps)):
            follow(paces, block, self.ranks_per_node, number)
            yield STEPS_PER_BLOCK * (number + 1), frozenset(paces.stragglers)

    def steps_until_named(self, seed: int, most: int) -> float:
        """In how many slow steps all slow ranks are named; infinite: not within `most`."""
        for step, named in self.named(seed, self.slow_from + most):
            if step > self.slow_from and named >= set(self.slow_ranks):
                return step - self.slow_from
        return math.inf

    def false_names(self, seed: int, steps: int) -> int:
        """How often a rank that is not slow is named."""
        count, before = 0, frozenset(self.slow_ranks)
        for _, named in self.named(seed, steps):
            count += len(named - before)
            before = named | set(self.slow_ranks)
        return count

    def _blocks(self, chance: random.Random, steps: int) -> Iterator[dict[int, BlockTime]]:
        paces = self._paces(chance)
        for _ in range(steps // STEPS_PER_BLOCK):
            block = [self._step(chance, next(paces)) for _ in range(STEPS_PER_BLOCK)]
            longest = [max(step) for step in block]
            yield {
                rank: BlockTime(
                    _median([step[rank] for step in block]),
                    _median([most - step[rank] for most, step in zip(longest, block, strict=True)]),
                )
                for rank in range(self.ranks)
            }

    def _step(self, chance: random.Random, paces: list[float]) -> list[float]:
        spread = math.sqrt(math.log1p(self.noise**2))
        times = [STEP_US * pace * chance.lognormvariate(0.0, spread) for pace in paces]
        if self.troubled:
            times = [time * (SPIKE if chance.random() < SPIKES else 1.0) for time in times]
        return times

    def _paces(self, chance: random.Random) -> Iterator[list[float]]:
        """For each step, how many times longer than usual each rank computes, without noise."""
        phases = [2 * math.pi * chance.random() for _ in range(self.ranks)]
        turns = self._turns(chance)
        for step in itertools.count(1):
            slow = SLOWER if step > self.slow_from else 1.0
            paces = [slow if rank in self.slow_ranks else 1.0 for rank in range(self.ranks)]
            if self.troubled:
                turn, factor = next(turns)
                angle = 2 * math.pi * step / DRIFT_STEPS
                shared = 1.0 + 0.5 * math.sin(angle)
                for rank, phase in enumerate(phases):
                    in_turn = factor if rank // self.ranks_per_node == turn else 1.0
                    paces[rank] *= shared * in_turn * (1.0 + DRIFT * math.sin(angle + phase))
            yield paces

    def _turns(self, chance: random.Random) -> Iterator[tuple[int, float]]:
        """For each step, which node is slow, and how many times longer its ranks compute; node -1: none."""
        nodes = list(range(math.ceil(self.ranks / self.ranks_per_node)))
        last = -1
        while True:
            chance.shuffle(nodes)
            if nodes[0] == last:
                nodes.append(nodes.pop(0))
            for last in nodes:
                pause = chance.expovariate(1 / self.pause_steps) if self.pause_steps else 0.0
                yield from itertools.repeat((-1, 1.0), int(pause))
                yield from itertools.repeat((last, chance.uniform(*TURN_FACTOR)), chance.randint(*TURN_STEPS))


def _median(times_us: list[float]) -> int:
    middle = sorted(times_us)[1:-1]
    return int(sum(middle) / len(middle))
