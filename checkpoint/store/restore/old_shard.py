"""The shard of one rank of an earlier world size, as far as this node's ranks have asked for its bytes.

Nobody asks for whole shards here: fewer ranks need the halves of many, more ranks need parts of one. So the shard has
sparse memory of its full size, and only pieces that cover what was asked for are ever written into it. A shard in this
node's own slot is not copied.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory, available_bytes
from muster.checkpoint.store.memory.shards import Shard

ByteSpan = tuple[int, int]
"""Offset of the first byte, and offset behind the last one."""


@dataclass(eq=False)
class OldShard:
    """What this node has of one old rank's shard.

    `pieces`: of the whole shard; empty until the first holder has answered.
    `memory`: where verified pieces are; None until then.
    `shard`: the shard of this node whose memory `memory` is; it is held. None: `memory` is its own.
    `verified`: numbers of the pieces that ranks may read.
    `turn`: held while pieces are brought, so that no two ranks have the same piece brought.
    """

    rank: int
    pieces: tuple[Piece, ...] = ()
    memory: SealedMemory | None = None
    shard: Shard | None = None
    verified: set[int] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def size(self) -> int:
        """Bytes of the whole shard."""
        return sum(piece.length for piece in self.pieces)

    def use_memory_of(self, shard: Shard) -> None:
        """Read from the memory of a shard of this node, which is held from now on."""
        self.shard, self.pieces, self.memory = shard.hold(), shard.pieces, shard.memory

    def use_own_memory(self, name: str, pieces: tuple[Piece, ...]) -> None:
        """Make sparse memory for a shard with these pieces, unless there is one already. Nothing is verified then.

        Raises:
            NoMemoryLeft: nobody knows how much memory is left.
        """
        if self.memory is not None and self.shard is None:
            return
        self.close()
        self.memory = SealedMemory(name, sum(piece.length for piece in pieces), sparse=True)
        self.pieces = pieces

    def numbers_of(self, spans: Iterable[ByteSpan]) -> set[int]:
        """The pieces that cover these bytes.

        Raises:
            CorruptShard: the shard has no such bytes.
        """
        offsets, found = [piece.offset for piece in self.pieces], set[int]()
        for first, end in spans:
            if not 0 <= first < end <= self.size:
                raise CorruptShard(f"rank {self.rank}'s shard of {self.size} bytes has no bytes {first} to {end}")
            found.update(range(bisect_right(offsets, first) - 1, bisect_right(offsets, end - 1)))
        return found

    @property
    def footer_number(self) -> int:
        """The piece with the footer: the last one."""
        return len(self.pieces) - 1

    def header(self) -> ByteSpan:
        """Where the index, the leaf directory, the metadata and the footer are. The footer's piece is verified."""
        assert self.memory is not None
        return layout.read_footer(self.memory.view).header_offset, self.size

    def require_memory(self, numbers: Collection[int]) -> None:
        """Raises NoMemoryLeft: the node has no memory for these pieces."""
        need = sum(self.pieces[n].length for n in numbers)
        if need > available_bytes():
            raise NoMemoryLeft(f"no memory for {need >> 20} MiB of rank {self.rank}'s shard")

    def close(self) -> None:
        """Let the memory go. Ranks keep what they have mapped."""
        self.verified.clear()
        if self.shard is not None:
            self.shard.release()
        elif self.memory is not None:
            self.memory.close()
        self.shard = self.memory = None
