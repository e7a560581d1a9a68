"""Virtual time: a queue of actions, each with the time at which it is due.

Actions that are due at the same time run in the order in which they were scheduled, so one seed gives one run.
"""

from __future__ import annotations

from collections.abc import Callable
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
