"""The parts of parities in this node's memory, and the memory that the next versions' parts take."""

import logging
from collections.abc import Callable, Iterable

from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.redundancy.scheme import Place
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory, available_bytes
from muster.checkpoint.store.parity.parity_part import ParityPart, PartKey
from muster.v1.agent_pb2 import ParityStatus

log = logging.getLogger(__name__)

_PartName = tuple[tuple[int, ...], int]
"""Ranks and part: a part at any version."""
_SPARE_PIECES = 8
"""Pieces for which there is more room than the first shard needs: the other shards may be a little larger."""


class ParityStore:
    """All parts of this node, whole ones and those that grow.

    Args:
        gang_id: part of the names of the memfds.
        on_change: called after whole parts were added or dropped.
    """

    def __init__(self, gang_id: str, on_change: Callable[[], None]) -> None:
        self._gang_id = gang_id
        self._on_change = on_change
        self._parts: dict[PartKey, ParityPart] = {}
        self._reusable: dict[_PartName, tuple[SealedMemory, int]] = {}
        self._held: frozenset[_PartName] = frozenset()
        self._allocated_count = 0

    def set_held(self, places: Iterable[Place]) -> None:
        """Set the parts that belong on this node. Reusable memory of all others is closed."""
        self._held = frozenset((place.ranks, place.part) for place in places)
        for place in self._reusable.keys() - self._held:
            self._reusable.pop(place)[0].close()

    def part(self, key: PartKey, pieces: int, incoming_bytes: int) -> ParityPart:
        """The part, with memory for `pieces` pieces at least if it is new. `incoming_bytes` will be written to it.

        Raises:
            NoMemoryLeft: there is too little memory.
        """
        found = self._parts.get(key)
        if found is None:
            memory, capacity = self._take(key, pieces, incoming_bytes)
            place = key.ranks, key.part
            found = ParityPart(key, memory, capacity, lambda *freed: self._reuse_or_close(place, *freed))
            self._parts[key] = found
        return found

    def _take(self, key: PartKey, pieces: int, incoming_bytes: int) -> tuple[SealedMemory, int]:
        memory, capacity = self._reusable.pop((key.ranks, key.part), (None, 0))
        if memory is not None and capacity >= pieces:
            return memory, capacity
        if memory is not None:
            memory.close()
        return self.allocate(key, pieces, incoming_bytes)

    def allocate(self, key: PartKey, pieces: int, incoming_bytes: int) -> tuple[SealedMemory, int]:
        """New memory for `pieces` pieces of a part and some more, and for how many it is.

        Raises:
            NoMemoryLeft: there is too little memory.
        """
        if incoming_bytes > available_bytes():
            raise NoMemoryLeft(f"no memory for {incoming_bytes >> 20} MiB of the parity of ranks {key.ranks}")
        self._allocated_count += 1
        capacity = pieces + _SPARE_PIECES
        name = f"muster-{self._gang_id}-r{key.ranks[0]}-x{self._allocated_count}"
        return SealedMemory(name, capacity * PIECE_BYTES, sparse=True), capacity

    def _reuse_or_close(self, place: _PartName, memory: SealedMemory, capacity: int) -> None:
        if place in self._held and place not in self._reusable:
            self._reusable[place] = memory, capacity
        else:
            memory.close()

    def note_whole(self, part: ParityPart) -> None:
        """A part is whole."""
        log.debug("part %d of the parity of ranks %s at %s is whole", part.key.part, part.key.ranks, part.key.version)
        self._on_change()

    def find(self, key: PartKey) -> ParityPart | None:
        """A whole part; None: it is not here, or not whole yet."""
        part = self._parts.get(key)
        return part if part is not None and part.shard is not None else None

    def statuses(self) -> list[ParityStatus]:
        """All whole parts, as the agent reports them."""
        return [part.status() for _, part in sorted(self._parts.items()) if part.shard is not None]

    def drop(self, is_dropped: Callable[[Version], bool]) -> None:
        """Drop all parts of the versions for which `is_dropped` returns True."""
        dropped = [self._parts.pop(key) for key in list(self._parts) if is_dropped(key.version)]
        for part in dropped:
            part.drop()
        if dropped:
            self._on_change()

    def quarantine(self, part: ParityPart, reason: str) -> None:
        """Drop a part whose bytes have changed."""
        if self._parts.get(part.key) is part:
            log.error("the parity of ranks %s at %s is corrupt and no longer used: %s", *part.key[1::-1], reason)
            del self._parts[part.key]
            part.drop()
            self._on_change()

    def close(self) -> None:
        """Free all memory."""
        self.set_held(())
        self.drop(lambda _: True)
