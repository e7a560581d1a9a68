"""One deadline for each key, and the nearest of all deadlines without a search."""

import heapq


class Deadlines:
    """The next deadline (seconds) of each key.

    To set, drop or find the nearest deadline costs time that grows with the logarithm of the number of deadlines.
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # old deadlines stay in the heap until they reach its top

    def get(self, key: str) -> float | None:
        """The deadline of `key`; None if it has none."""
        return self._at.get(key)

    def set(self, key: str, at: float | None) -> None:
        """Replace the deadline of `key`. None: `key` has no deadline."""
        if at is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            heapq.heappush(self._heap, (at, key))

    @property
    def nearest(self) -> float | None:
        """The nearest deadline of all keys; None if no key has one."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[str]:
        """Remove and return the keys whose deadline has come at `now`, the earliest first."""
        taken = []
        while (at := self.nearest) is not None and at <= now:
            taken.append(self._heap[0][1])
            self.set(taken[-1], None)
        return taken
