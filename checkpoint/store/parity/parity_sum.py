"""The sum (XOR) of the sources of a lost shard, in the memory of that shard: added in any order, by several threads."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from muster.checkpoint.store.memory.pieces import Piece, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.store.streams.transport import Holder

_LOCKS = 16
"""Threads that add to different pieces rarely wait for each other."""


@dataclass
class AddedPieces:
    """What one source gives. `places`: the pieces of a shard or a part, as they are staged.

    `numbers`: the numbers of these pieces, by the numbers of the lost pieces that they are added to, in their order.
    """

    holders: Sequence[Holder]
    places: list[Piece]
    numbers: dict[int, int]


class ParitySum:
    """The pieces of one lost shard.

    Args:
        pieces: of the lost shard.
        sources: all that is added. Each lost piece needs one of them at least.
        memory: of the lost shard, with any content.
    """

    def __init__(self, pieces: Sequence[Piece], sources: Sequence[AddedPieces], memory: SealedMemory) -> None:
        self._pieces, self._memory = pieces, memory
        self._missing = Counter(lost for source in sources for lost in source.numbers)
        """For each piece: how many sources are still to be added."""
        self._begun: set[int] = set()
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def add(self, source: AddedPieces, lost: Sequence[int], staged: memoryview) -> int:
        """Add what a source gives to some lost pieces, each once.

        Returns:
            Bytes of the lost pieces that are whole by this, and verified.

        Raises:
            CorruptShard: a piece that is whole does not match its digest.
        """
        whole = []
        for number in lost:
            place = source.places[source.numbers[number]]
            with self._locks[number % _LOCKS]:
                self._add(number, staged[place.offset : place.offset + place.length])
                self._missing[number] -= 1
                if not self._missing[number]:
                    whole.append(number)
        verify_pieces(self._memory, self._pieces, whole)
        return sum(self._pieces[number].length for number in whole)

    def _add(self, number: int, data: memoryview) -> None:
        piece = self._pieces[number]
        target = self._memory.view[piece.offset : piece.offset + piece.length]
        data = data[: piece.length]
        if number in self._begun:
            exclusive_or.add(target[: len(data)], data)
            return
        target[: len(data)] = data
        target[len(data) :] = bytes(piece.length - len(data))
        self._begun.add(number)
