"""Slots: the sealed memfds that a rank's snapshots go to and that this agent owns.

A memfd outlives the rank that wrote it, and no cleaner of /dev/shm reaches it. Sealed against shrinking, so that no
rank can make its agent die of SIGBUS; its pages are taken at once, so that memory runs out when slots are made, not
in a step.

A slot is free, or full: it holds a state, from the rank's RankFilled until nobody holds its shard any more.
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format.errors import CorruptShard

SLOTS_PER_RANK = 2

MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of every memfd that others may map: none of them can make it end sooner than it says."""


class NoMemoryLeft(Exception):
    """There is no room for a memfd of the size that is wanted, in words."""


class SealedMemory:
    """A sealed memfd and this process's view of it."""

    def __init__(self, name: str, size: int, *, sparse: bool = False) -> None:
        """Make one of `size` bytes, zeroed.

        Args:
            name: shown in /proc/PID/maps, "muster-GANG-rR-sS".
            size: bytes, at least 1.
            sparse: take pages as they are written, not at once.

        Raises:
            NoMemoryLeft: the system, or the job's limit, has no room.
        """
        self.fd = -1
        left = available_bytes()
        if not sparse and size > left:
            raise NoMemoryLeft(f"{name} needs {size >> 20} MiB, and {left >> 20} MiB are left to this job on this node")
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            if not sparse:
                os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, MEMFD_SEALS)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            raise NoMemoryLeft(f"{name} of {size >> 20} MiB: {error.strerror}") from error
        self.view = memoryview(self._map)

    @classmethod
    def adopt(cls, fd: int) -> "SealedMemory":
        """One that another process of this user has made; owns `fd` from now on.

        Raises:
            CorruptShard: it isn't sealed as it was made, so that reading it could be the end of this process.
        """
        memory = cls.__new__(cls)
        memory.fd = fd
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & MEMFD_SEALS != MEMFD_SEALS:
                raise CorruptShard("a memfd that can still grow or shrink")
            memory.size = os.fstat(fd).st_size
            memory._map = mmap.mmap(fd, memory.size)
        except (OSError, ValueError) as error:
            raise CorruptShard(f"no memory can be had through descriptor {fd}: {error}") from error
        memory.view = memoryview(memory._map)
        return memory

    def __del__(self) -> None:
        # Whoever had it made may have been cancelled meanwhile.
        if self.fd >= 0:
            os.close(self.fd)

    def read_only(self) -> int:
        """A new descriptor (the caller closes it) through which the bytes can't be changed."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def forget(self, offset: int, length: int) -> None:
        """Give the whole pages in this run back to the system; they read as zeros."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Let go of the memory; it is freed once nobody else maps it (a second call does nothing)."""
        if self.fd >= 0:
            os.close(self.fd)
        # The mapping goes with the last view of it: a thread may still be reading.
        self.fd, self.view = -1, memoryview(b"")
        del self._map


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the node has, and what each cgroup around it leaves (v2)."""
    left = _available(proc / "meminfo")
    try:
        group = next(g[3:] for g in (proc / "self/cgroup").read_text().splitlines() if g.startswith("0::"))
    except (OSError, StopIteration):
        return left
    place = cgroup / group.lstrip("/")
    while place != cgroup and cgroup in place.parents:
        left = min(left, _left_in(place, left))
        place = place.parent
    return left


def _left_in(group: Path, most: int) -> int:
    """What a cgroup's limit leaves; files in its page cache make way."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return most
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text())
    except OSError:
        return most
    return int(limit) - used + int(stat["file"]) - int(stat["shmem"])


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NoMemoryLeft(f"{meminfo} has no MemAvailable: what is left can't be told")


@dataclass(eq=False)
class Slot:
    """One memfd of a rank. `number` is None where the rank has been given others since: it goes once it is free."""

    rank: int
    memory: SealedMemory
    number: int | None
    full: bool
    fills: int = 0
    """How many times the rank has filled it since it was dealt."""


class SlotPool:
    """The slots of all ranks of this node.

    Args:
        gang_id: goes into the names.
        freed: told the rank that has a free slot again.
    """

    def __init__(self, gang_id: str, freed: Callable[[int], None]) -> None:
        self._gang_id = gang_id
        self._freed = freed
        self._slots: dict[int, list[Slot]] = {}
        self._made = 0

    def make(self, rank: int, size: int) -> SealedMemory:
        """A new memory for a rank's slot; safe to call from a thread. Raises NoMemoryLeft."""
        self._made += 1
        return SealedMemory(f"muster-{self._gang_id}-r{rank}-s{self._made}", size)

    def adopt(self, rank: int, memory: SealedMemory) -> Slot:
        """Take in a memory that holds a state which the rank didn't write itself."""
        slot = Slot(rank, memory, None, full=True)
        self._slots.setdefault(rank, []).append(slot)
        return slot

    def fitting(self, rank: int, size: int) -> int:
        """How many slots of this size the rank has already, two at most."""
        return len([s for s in self._slots.get(rank, []) if s.memory.size == size][:SLOTS_PER_RANK])

    def deal(self, rank: int, size: int, fresh: list[SealedMemory]) -> list[Slot]:
        """The rank's two slots of `size` bytes: what it has, full ones first, then `fresh`. Others go when free."""
        before = self._slots.get(rank, [])
        kept = sorted((s for s in before if s.memory.size == size), key=lambda s: not s.full)[:SLOTS_PER_RANK]
        dealt = kept + [Slot(rank, memory, None, full=False) for memory in fresh]
        self._slots[rank] = dealt + [s for s in before if s not in kept]
        for number, slot in enumerate(dealt):
            slot.number, slot.fills = number, 0
        for slot in [s for s in before if s not in kept]:
            slot.number = None
            if not slot.full:
                self._discard(slot)
        return dealt

    def fill(self, rank: int, number: int) -> Slot | None:
        """Mark a slot as full; None where the rank has no such free slot."""
        for slot in self._slots.get(rank, []):
            if slot.number == number and not slot.full:
                slot.full = True
                slot.fills += 1
                return slot
        return None

    def spare(self, rank: int) -> Slot | None:
        """The free slot that the rank is to write next; None where all are full."""
        free = [s for s in self._slots.get(rank, []) if s.number is not None and not s.full]
        return min(free, key=lambda s: s.number or 0, default=None)

    def free(self, slot: Slot) -> None:
        """Nobody holds the state in this slot any more."""
        slot.full = False
        if slot.number is None:
            self._discard(slot)
        else:
            self._freed(slot.rank)

    def _discard(self, slot: Slot) -> None:
        if slot in self._slots.get(slot.rank, []):
            self._slots[slot.rank].remove(slot)
            slot.memory.close()

    def close(self) -> None:
        """Give all memory back."""
        for slots in self._slots.values():
            for slot in slots:
                slot.memory.close()
        self._slots.clear()
