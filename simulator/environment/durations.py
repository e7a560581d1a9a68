"""How long things take on the nodes: drawn from the seed, or fixed where a script wants no rng."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds, the longest of each; the shortest is a tenth. `constant`: no rng, always half of it."""

    step_s: float = 0.4
    boot_s: float = 1.5
    kill_s: float = 0.15
    store_s: float = 0.6
    copy_s: float = 0.2
    flush_s: float = 1.0
    launch_s: float = 1.5
    constant: bool = False


class DurationSampler:
    """Draws durations."""

    def __init__(self, durations: Durations, rng: random.Random) -> None:
        self._durations = durations
        self._rng = rng

    def _sample_s(self, longest: float) -> float:
        if self._durations.constant:
            return longest / 2
        return longest * (0.1 + 0.9 * self._rng.random())

    def step_s(self) -> float:
        """One optimizer step: all ranks are as fast."""
        return self._durations.step_s

    def boot_s(self) -> float:
        """From the order to a rank that loads its state."""
        return self._sample_s(self._durations.boot_s)

    def kill_s(self) -> float:
        """From SIGKILL until the process is gone."""
        return self._sample_s(self._durations.kill_s)

    def store_s(self) -> float:
        """Until the rendezvous store listens."""
        return self._sample_s(self._durations.store_s)

    def copy_s(self) -> float:
        """A shard's way to its buddy."""
        return self._sample_s(self._durations.copy_s)

    def flush_s(self) -> float:
        """Writing one node's shards to durable storage."""
        return self._sample_s(self._durations.flush_s)

    def launch_s(self) -> float:
        """From the job's start to an agent that attaches."""
        return self._sample_s(self._durations.launch_s)
