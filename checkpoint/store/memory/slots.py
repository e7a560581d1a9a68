"""Slots: the two memory buffers of each rank that snapshots are written to.

A slot is free or full. A slot becomes full when its rank reports that it has filled the slot. It becomes free when
nothing holds its shard any more.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from muster.checkpoint.store.memory.reserve import MemoryReserve
from muster.checkpoint.store.memory.sealed_memory import SealedMemory

SLOTS_PER_RANK = 2
"""One slot holds the committed version while the rank writes the next version into the other one."""


@dataclass(eq=False)
class Slot:
    """One memfd of a rank.

    `number`: 0 or 1; None for a slot that the rank does not write to. Such a slot is closed when it becomes free.
    """

    rank: int
    memory: SealedMemory
    number: int | None
    full: bool
    fill_count: int = 0
    """How many times the rank has filled the slot since the slot got its number."""


class SlotPool:
    """The slots of all ranks of this node.

    Args:
        gang_id: part of the names of the memfds.
        on_free: called with a rank that has a free slot again.
    """

    def __init__(self, gang_id: str, on_free: Callable[[int], None]) -> None:
        self._gang_id = gang_id
        self._on_free = on_free
        self._slots: dict[int, list[Slot]] = {}
        self._allocated_count = 0
        self.reserve = MemoryReserve(gang_id)
        """Memory for ranks that may come to this node."""

    def allocate(self, rank: int, size: int, *, later: bool = False) -> SealedMemory:
        """Allocate memory of `size` bytes for a slot of the rank. A thread may call this. `later`: of new memory the
        caller has to `allocate` the pages.

        Raises:
            NoMemoryLeft: there is too little memory.
        """
        reserved = self.reserve.take(size)
        if reserved is not None:
            return reserved
        self._allocated_count += 1
        return SealedMemory(f"muster-{self._gang_id}-r{rank}-s{self._allocated_count}", size, later=later)

    def adopt(self, rank: int, memory: SealedMemory) -> Slot:
        """Make a full slot of memory that holds a state which the rank did not write itself."""
        slot = Slot(rank, memory, None, full=True)
        self._slots.setdefault(rank, []).append(slot)
        return slot

    def count_of_size(self, rank: int, size: int) -> int:
        """How many slots of exactly this size the rank has, at most SLOTS_PER_RANK."""
        return len([s for s in self._slots.get(rank, []) if s.memory.size == size][:SLOTS_PER_RANK])

    def bytes_of(self, rank: int) -> int:
        """How many bytes all slots of the rank have."""
        return sum(slot.memory.size for slot in self._slots.get(rank, []))

    def close_free_of_other_sizes(self, rank: int, size: int) -> None:
        """Close the free slots of a rank that are not of `size` bytes, so that there is memory for new ones."""
        for slot in [s for s in self._slots.get(rank, []) if s.memory.size != size and not s.full]:
            self._close_slot(slot)

    def assign(self, rank: int, size: int, new_memories: list[SealedMemory]) -> list[Slot]:
        """Number the rank's slots of `size` bytes: existing ones first, full before free, then `new_memories`.

        All other slots of the rank are closed when they become free.
        """
        before = self._slots.get(rank, [])
        kept = sorted((s for s in before if s.memory.size == size), key=lambda s: not s.full)[:SLOTS_PER_RANK]
        assigned = kept + [Slot(rank, memory, None, full=False) for memory in new_memories]
        self._slots[rank] = assigned + [s for s in before if s not in kept]
        for number, slot in enumerate(assigned):
            slot.number, slot.fill_count = number, 0
        for slot in [s for s in before if s not in kept]:
            slot.number = None
            if not slot.full:
                self._close_slot(slot)
        return assigned

    def retire_all_but(self, ranks: Collection[int]) -> None:
        """Close the slots of all other ranks as soon as they are free: these ranks run elsewhere, or no longer."""
        for slot in [s for rank, slots in self._slots.items() if rank not in ranks for s in slots]:
            slot.number = None
            if not slot.full:
                self._close_slot(slot)

    def mark_full(self, rank: int, number: int) -> Slot | None:
        """Mark a slot as full; None if the rank has no free slot of this number."""
        for slot in self._slots.get(rank, []):
            if slot.number == number and not slot.full:
                slot.full = True
                slot.fill_count += 1
                return slot
        return None

    def next_free(self, rank: int) -> Slot | None:
        """The free slot that the rank shall write next; None if all slots are full."""
        free = [s for s in self._slots.get(rank, []) if s.number is not None and not s.full]
        return min(free, key=lambda s: s.number or 0, default=None)

    def mark_free(self, slot: Slot) -> None:
        """Mark a slot as free: nothing holds its shard any more."""
        slot.full = False
        if slot.number is None:
            self._close_slot(slot)
        else:
            self._on_free(slot.rank)

    def _close_slot(self, slot: Slot) -> None:
        if slot in self._slots.get(slot.rank, []):
            self._slots[slot.rank].remove(slot)
            slot.memory.close()

    def close(self) -> None:
        """Close the memory of all slots, and the reserve."""
        self.reserve.close()
        for slots in self._slots.values():
            for slot in slots:
                slot.memory.close()
        self._slots.clear()
