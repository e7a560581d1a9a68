"""Virtual time: a queue of actions, each with the time at which it is due; and how long things take.

Actions that are due at the same time run in the order in which they were scheduled, so one seed gives one run. A seed
samples each duration; a scenario uses constant durations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Schedule:
    """A queue of timed actions. `now` is in seconds. It advances only in `step` and `run_until`."""

    def __init__(self, start: float) -> None:
        self.now = start
        self.steps = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._count = 0

    def call_at(self, moment: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` at `moment`, or at once if that time has passed."""
        self._count += 1
        heappush(self._heap, (moment if moment > self.now else self.now, self._count, action, args))

    def call_later(self, delay: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` in `delay` seconds."""
        self._count += 1
        heappush(self._heap, (self.now + delay if delay > 0.0 else self.now, self._count, action, args))

    def next_time(self) -> float | None:
        """The time at which the next action is due. None: no action is left."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Advance to the next action and run it.

        Raises:
            IndexError: no action is left.
        """
        self.now, _, action, args = heappop(self._heap)
        self.steps += 1
        action(*args)

    def run_until(self, moment: float) -> None:
        """Run every action that is due by `moment`, then set `now` to `moment`."""
        heap = self._heap
        while heap and heap[0][0] <= moment:
            self.now, _, action, args = heappop(heap)
            self.steps += 1
            action(*args)
        self.now = max(self.now, moment)


@dataclass(frozen=True, slots=True)
class Durations:
    """The longest duration of each kind, in seconds. The shortest is a tenth of it.

    `constant`: use half of the longest duration every time, and no random numbers.
    """

    step_s: float = 0.4
    boot_s: float = 1.5
    kill_s: float = 0.15
    store_s: float = 0.6
    copy_s: float = 0.2
    flush_s: float = 1.0
    launch_s: float = 1.5
    exit_s: float = 0.3
    stop_s: float = 1.0
    check_s: float = 4.0
    constant: bool = False


class DurationSampler:
    """Samples durations. All methods return seconds."""

    def __init__(self, durations: Durations, rng: random.Random) -> None:
        self._durations = durations
        self._rng = rng

    def _sample_s(self, longest: float) -> float:
        if self._durations.constant:
            return longest / 2
        return longest * (0.1 + 0.9 * self._rng.random())

    def step_s(self) -> float:
        """One step of the optimizer. It is the same for all ranks."""
        return self._durations.step_s

    def boot_s(self) -> float:
        """From the start of a rank's process until the rank loads its state."""
        return self._sample_s(self._durations.boot_s)

    def kill_s(self) -> float:
        """From SIGKILL until the process is gone."""
        return self._sample_s(self._durations.kill_s)

    def store_s(self) -> float:
        """Until the rendezvous store listens."""
        return self._sample_s(self._durations.store_s)

    def copy_s(self) -> float:
        """Copying a shard to another node."""
        return self._sample_s(self._durations.copy_s)

    def flush_s(self) -> float:
        """Writing one node's shards to durable storage."""
        return self._sample_s(self._durations.flush_s)

    def launch_s(self) -> float:
        """From the start of the job until an agent attaches."""
        return self._sample_s(self._durations.launch_s)

    def exit_s(self) -> float:
        """From the last step of a training until the rank's process is gone."""
        return self._sample_s(self._durations.exit_s)

    def stop_s(self) -> float:
        """From the last step of a rank that was asked to stop until its process is gone. A script may clean up."""
        return self._sample_s(self._durations.stop_s)

    def check_s(self) -> float:
        """A node check, with the import of PyTorch."""
        return self._sample_s(self._durations.check_s)

    def fault_s(self, longest: float) -> float:
        """How long a fault lasts: mostly short, sometimes up to `longest`."""
        return longest * self._rng.random() ** 3 + 0.05
