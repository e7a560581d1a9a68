"""Memory that a node without ranks keeps ready, so that a rank which moves here need not wait for the kernel.

The first touch of memory takes several times as long as the bytes of a shard take to arrive: the kernel has to find
each page, clear it and map it. A spare has time for that before it is needed.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from muster.checkpoint.format.touched_memory import map_touched
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS, NoMemoryLeft, SealedMemory, available_bytes


class _Ready(NamedTuple):
    """Memory that is touched, and not sealed yet."""

    size: int
    fd: int
    mapping: mmap.mmap


class MemoryReserve:
    """Memories of one size. Threads may use it. `available`: how many bytes the node has left."""

    def __init__(self, gang_id: str, available: Callable[[], int] = available_bytes) -> None:
        self._gang_id = gang_id
        self._available = available
        self._lock = threading.Lock()
        self._filling = threading.Lock()
        """Held while memory is touched: one `fill` at a time."""
        self._ready: list[_Ready] = []
        self._wanted = 0
        """How many the `fill` under way shall keep ready."""
        self._made_count = 0
        self._closed = False

    @property
    def bytes(self) -> int:
        """The bytes that are kept ready."""
        with self._lock:
            return sum(ready.size for ready in self._ready)

    def count(self, size: int) -> int:
        """How many memories of `size` bytes can be taken."""
        with self._lock:
            return sum(ready.size >= size for ready in self._ready)

    def fill(self, size: int, count: int) -> None:
        """Keep `count` memories of `size` bytes ready, and none of another size. Takes about a second for each GiB: run
        it in a thread. It makes fewer if some are taken meanwhile, and ends if all are dropped.

        Raises:
            NoMemoryLeft: there is too little memory for all of them. Fewer are kept.
        """
        with self._filling:
            if any(ready.size != size for ready in self._ready):
                self.drop()
            self._wanted = count
            while not self._closed and len(self._ready) < self._wanted:
                if size > self._available():
                    raise NoMemoryLeft(f"{count} times {size >> 20} MiB can't be kept ready")
                ready = self._touched(size)
                with self._lock:
                    self._ready.append(ready)
            if self._closed or not self._wanted:
                self.drop()

    def _touched(self, size: int) -> _Ready:
        self._made_count += 1
        name = f"muster-{self._gang_id}-reserve{self._made_count}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            return _Ready(size, fd, map_touched(fd, size))
        except OSError as error:
            os.close(fd)
            raise NoMemoryLeft(f"{size >> 20} MiB can't be kept ready: {error.strerror}") from error

    def take(self, size: int) -> SealedMemory | None:
        """A memory of exactly `size` bytes from what is kept ready; None: nothing fits."""
        with self._lock:
            if not self._ready or size > self._ready[-1].size:
                return None
            ready = self._ready.pop()
            self._wanted = max(0, self._wanted - 1)
        os.ftruncate(ready.fd, size)
        fcntl.fcntl(ready.fd, fcntl.F_ADD_SEALS, MEMFD_SEALS)
        return SealedMemory.of_mapping(ready.fd, ready.mapping, size)

    def drop(self) -> None:
        """Free what is kept ready."""
        with self._lock:
            dropped, self._ready, self._wanted = self._ready, [], 0
        for ready in dropped:
            ready.mapping.close()
            os.close(ready.fd)

    def close(self) -> None:
        """Free all, and keep nothing from now on. A `fill` under way frees what it has just made."""
        self._closed = True
        self.drop()
