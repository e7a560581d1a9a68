"""Virtual time: what happens when. Ties are broken by the order of asking, so one script gives one run."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Schedule:
    """`now` moves only by `step`. Seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self.steps = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._count = 0

    def at(self, moment: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` at `moment`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._count, action, args))

    def later(self, delay: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` in `delay` seconds."""
        self.at(self.now + delay, action, *args)

    def next_at(self) -> float | None:
        """When the next action is due; None: nothing will happen."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Let time pass to the next action, and take it.

        Raises:
            IndexError: there is none.
        """
        self.now, _, action, args = heapq.heappop(self._heap)
        self.steps += 1
        action(*args)
