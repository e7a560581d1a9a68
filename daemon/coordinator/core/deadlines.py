"""When the core wants to look again: one moment for each key, the nearest of all at hand at once."""

import heapq


class Deadlines:
    """A moment (seconds) for each key. Setting, dropping and finding the nearest cost the logarithm of their number."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # holds moments that were moved or dropped too, until they come up

    def get(self, key: str) -> float | None:
        """The moment of `key`."""
        return self._at.get(key)

    def set(self, key: str, at: float | None) -> None:
        """`key` is due at `at`, and at no other moment; None: never."""
        if at is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            heapq.heappush(self._heap, (at, key))

    @property
    def nearest(self) -> float | None:
        """The nearest moment of all; None where nothing is due."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[str]:
        """Keys that are due at `now`, the earliest first; they are dropped."""
        taken = []
        while (at := self.nearest) is not None and at <= now:
            taken.append(self._heap[0][1])
            self.set(taken[-1], None)
        return taken
