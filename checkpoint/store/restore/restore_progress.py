"""How far this node's part of a restore is: bytes by where they came from."""

import threading

from muster.daemon.host import clock
from muster.v1.agent_pb2 import RestoreProgress


class NodeRestore:
    """The restore of a generation's ranks on this node. Threads may use it.

    Args:
        generation: of the ranks.
        ranks: how many ranks of this node get a state from memory.
    """

    def __init__(self, generation: int = 0, ranks: int = 0) -> None:
        self._lock = threading.Lock()
        self._generation = generation
        self._ranks = ranks
        self._began = clock.monotonic()
        self._ended: float | None = None
        self._bytes = self._own_bytes = self._copied_bytes = 0
        self._fetched: dict[str, int] = {}
        self._ranks_done = 0

    def note_size(self, size: int) -> None:
        """A rank's shard has so many bytes."""
        with self._lock:
            self._bytes += size

    def note_own(self, size: int) -> None:
        """So many bytes are verified where they are, in a slot of this node."""
        with self._lock:
            self._own_bytes += size

    def note_copied(self, size: int) -> None:
        """So many bytes were copied from other memory of this node."""
        with self._lock:
            self._copied_bytes += size

    def note_fetched(self, size: int, node: str) -> None:
        """So many bytes have come from another node."""
        with self._lock:
            self._fetched[node] = self._fetched.get(node, 0) + size

    def note_rank_done(self) -> None:
        """A rank has its whole state."""
        with self._lock:
            self._ranks_done += 1
            if self._ranks_done == self._ranks:
                self._ended = clock.monotonic()

    def status(self) -> RestoreProgress | None:
        """The progress as the agent reports it; None: no rank of this node gets a state from memory."""
        with self._lock:
            if not self._ranks:
                return None
            passed_s = (clock.monotonic() if self._ended is None else self._ended) - self._began
            return RestoreProgress(
                generation=self._generation,
                ranks=self._ranks,
                ranks_done=self._ranks_done,
                bytes=self._bytes,
                own_bytes=self._own_bytes,
                copied_bytes=self._copied_bytes,
                fetched_bytes=self._fetched,
                ms=round(passed_s * 1000),
            )
