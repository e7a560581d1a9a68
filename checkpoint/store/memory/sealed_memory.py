"""Sealed memfds: memory that the agent owns and that ranks and `musterd` may map.

A memfd outlives the rank that wrote it, and no cleaner of /dev/shm reaches it. The seals forbid to change its size:
shrinking the memfd would kill a process that reads it with SIGBUS. By default its pages are allocated at once, so that
a lack of memory shows when a slot is made and not during a training step.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakSet

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.touched_memory import touch
from muster.daemon.host.process.cgroup_memory import MemoryLeft, memory_left

MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of every memfd that other processes may map: its size can't change."""


ALLOCATED_BYTES = 16 << 20
"""Bytes that `allocate` has the kernel find at a time, in some milliseconds."""


class NoMemoryLeft(Exception):
    """There is no memory for a memfd of the wanted size. The message says how much is left."""


_SPARSE: "WeakSet[SealedMemory]" = WeakSet()
"""All sparse memory of this process that is still used."""
_TO_ALLOCATE: "WeakSet[SealedMemory]" = WeakSet()
"""All memory of this process whose pages `allocate` has still to allocate. Several threads use it, under the lock."""
_TO_ALLOCATE_LOCK = threading.Lock()


class SealedMemory:
    """A sealed memfd and this process's view of it."""

    _unallocated = 0
    """Bytes that `allocate` has still to allocate."""

    def __init__(self, name: str, size: int, *, sparse: bool = False, later: bool = False) -> None:
        """Make a memfd of `size` bytes, all zero.

        Args:
            name: shown in /proc/PID/maps, for example "muster-GANG-rR-sS".
            size: bytes, at least 1.
            sparse: allocate each page when it is written, not all at once.
            later: the caller calls `allocate` at once, and lets bytes come meanwhile.

        Raises:
            NoMemoryLeft: the node or the job's memory limit has too little memory left.
        """
        self.fd = -1
        left = left_to_this_process()
        if not sparse and size > left.bytes:
            words = f"{left.bytes >> 20} MiB are left to this job on this node ({left.limit})"
            raise NoMemoryLeft(f"{name} needs {size >> 20} MiB, and {words}")
        self.size = size
        try:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            if not sparse and not later:
                os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, MEMFD_SEALS)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            raise NoMemoryLeft(f"{name} of {size >> 20} MiB: {error.strerror}") from error
        self.view = memoryview(self._map)
        if sparse:
            _SPARSE.add(self)
        if later:
            self._unallocated = size
            with _TO_ALLOCATE_LOCK:
                _TO_ALLOCATE.add(self)

    def allocate(self, step_bytes: int = ALLOCATED_BYTES, allocate_pages: Callable[[int, int], bool] = touch) -> None:
        """Allocate all pages that are not there yet, from the begin on. A thread may call this: others may write
        meanwhile. It ends early if the memory is closed.

        `allocate_pages` has the kernel find the pages from an address on; False: it can't.

        Raises:
            NoMemoryLeft: there is too little memory.
        """
        if not self._unallocated:
            return
        view, size, descriptor = self.view, self.size, os.dup(self.fd)  # both outlive `close`
        try:
            begin = ctypes.addressof(ctypes.c_char.from_buffer(view))
            for start in range(0, size, step_bytes):
                length = min(step_bytes, size - start)
                if self.fd < 0:
                    return
                if not allocate_pages(begin + start, length):  # an older kernel can't
                    os.posix_fallocate(descriptor, start, length)
                self._unallocated = size - start - length
        except OSError as error:
            raise NoMemoryLeft(f"{size >> 20} MiB can't be allocated: {error.strerror}") from error
        finally:
            os.close(descriptor)
            with _TO_ALLOCATE_LOCK:
                _TO_ALLOCATE.discard(self)

    @classmethod
    def adopt(cls, fd: int) -> "SealedMemory":
        """Wrap a memfd that another process of this user has made. The new object owns `fd`.

        Raises:
            CorruptShard: the memfd is not sealed, so that reading it could kill this process.
        """
        memory = cls.__new__(cls)
        memory.fd = fd
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & MEMFD_SEALS != MEMFD_SEALS:
                raise CorruptShard("a memfd that can still grow or shrink")
            memory.size = os.fstat(fd).st_size
            memory._map = mmap.mmap(fd, memory.size)
        except (OSError, ValueError) as error:
            raise CorruptShard(f"descriptor {fd} can't be mapped: {error}") from error
        memory.view = memoryview(memory._map)
        return memory

    @classmethod
    def of_mapping(cls, fd: int, mapping: mmap.mmap, size: int) -> "SealedMemory":
        """Own a sealed memfd of `size` bytes that is mapped already, from its begin on. `mapping` may be longer."""
        memory = cls.__new__(cls)
        memory.fd, memory.size, memory._map = fd, size, mapping
        memory.view = memoryview(mapping)[:size]
        return memory

    def __del__(self) -> None:
        # The task that asked for this memory may have been cancelled before it could close the memory.
        if self.fd >= 0:
            os.close(self.fd)

    def open_read_only(self) -> int:
        """Open a new descriptor through which the bytes can't be changed. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def free_pages(self, offset: int, length: int) -> None:
        """Give all pages that lie completely in this range back to the system. They read as zeros."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Close the memory. The kernel frees it when no process maps it any more. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
        # The mapping lives as long as any view of it: a thread may still be reading.
        self.fd, self.view = -1, memoryview(b"")
        del self._map


def sparse_bytes() -> int:
    """Bytes of all sparse memory of this process that are allocated so far."""
    return sum(os.fstat(memory.fd).st_blocks * 512 for memory in list(_SPARSE) if memory.fd >= 0)


def _allocated_soon() -> int:
    """Bytes that are promised to memory of this process and not allocated yet."""
    with _TO_ALLOCATE_LOCK:
        return sum(memory._unallocated for memory in _TO_ALLOCATE if memory.fd >= 0)


def available_bytes() -> int:
    """Bytes that this process may still allocate: the least of what the node and each enclosing cgroup allow."""
    return left_to_this_process().bytes


def left_to_this_process() -> MemoryLeft:
    """What this process may still allocate, and what sets that limit. What is promised to other memory does not count.

    Raises:
        NoMemoryLeft: nobody knows.
    """
    left = memory_left()
    if left is None:
        raise NoMemoryLeft("/proc/meminfo has no line MemAvailable: how much memory is left is unknown")
    return replace(left, bytes=max(0, left.bytes - _allocated_soon()))
