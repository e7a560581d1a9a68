"""How many bytes of its part a node has written, counted by the threads that write them."""

import threading


class WrittenBytes:
    """Bytes that were given to storage, and how many there will be.

    `done`: bytes that have left this process. `total`: all bytes of the files that are known; 0: none is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = self.total = 0

    def begin(self, size: int) -> None:
        """There is a file of `size` bytes to write."""
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        """Bytes of a file were written."""
        with self._lock:
            self.done += size
