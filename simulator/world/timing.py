"""How long things take on the nodes: drawn from the seed, or fixed where a script wants no chance."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds, the longest of each; the shortest is a tenth. `steady`: no chance, always half of it."""

    step: float = 0.4
    boot: float = 1.5
    kill: float = 0.15
    store: float = 0.6
    copy: float = 0.2
    flush: float = 1.0
    launch: float = 1.5
    steady: bool = False


class Timing:
    """Draws durations."""

    def __init__(self, pace: Pace, chance: random.Random) -> None:
        self._pace = pace
        self._chance = chance

    def _draw(self, longest: float) -> float:
        if self._pace.steady:
            return longest / 2
        return longest * (0.1 + 0.9 * self._chance.random())

    def step(self) -> float:
        """One optimizer step: all ranks are as fast."""
        return self._pace.step

    def boot(self) -> float:
        """From the order to a rank that loads its state."""
        return self._draw(self._pace.boot)

    def kill(self) -> float:
        """From SIGKILL until the process is gone."""
        return self._draw(self._pace.kill)

    def store(self) -> float:
        """Until the rendezvous store listens."""
        return self._draw(self._pace.store)

    def copy(self) -> float:
        """A shard's way to its buddy."""
        return self._draw(self._pace.copy)

    def flush(self) -> float:
        """Writing one node's shards to durable storage."""
        return self._draw(self._pace.flush)

    def launch(self) -> float:
        """From the job's start to an agent that attaches."""
        return self._draw(self._pace.launch)
