"""What a fetch has brought: `Arrivals` of `transport`. Each one belongs to one fetch, whose threads tell it."""

import threading
from collections import Counter
from collections.abc import Callable


class DamagedArrivals:
    """Counts the pieces that the way damaged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_node: Counter[str] = Counter()

    def arrived(self, number: int, node: str) -> None:
        """A piece has come from `node`, and is verified."""

    def damaged(self, number: int, node: str) -> None:
        """What came from `node` does not match the piece's digest, though the bytes that `node` holds do."""
        with self._lock:
            self.by_node[node] += 1


class NotedArrivals(DamagedArrivals):
    """Keeps the numbers of the pieces that have come, too.

    Args:
        note: called with each of them, and the node that it came from.
    """

    def __init__(self, note: Callable[[int, str], None]) -> None:
        super().__init__()
        self._note = note
        self.numbers: set[int] = set()

    def arrived(self, number: int, node: str) -> None:
        """A piece has come from `node`, and is verified."""
        self.numbers.add(number)
        self._note(number, node)
