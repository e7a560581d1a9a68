"""One part of a parity in this node's memory: the XOR of pieces of several ranks' shards at one version.

The parity of N ranks has N parts, and part P combines the shards of all ranks but the one at place P, on whose node it
is. Each of these shards gives every (N - 1)-th piece to the part: its pieces go in turn to the other N - 1 parts.

Pieces are combined by their numbers, and shorter ones count as zeros. So shards need not have equal layouts. The piece
at position K of the part lies at K times the largest piece, in sparse memory: what no shard needs costs nothing.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest, size_of
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.parity import exclusive_or
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_PARITY, ParityStatus


class PartKey(NamedTuple):
    """Which part of which parity."""

    version: Version
    ranks: tuple[int, ...]
    part: int

    @property
    def combined(self) -> tuple[int, ...]:
        """The ranks whose shards the part combines."""
        return self.ranks[: self.part] + self.ranks[self.part + 1 :]

    @property
    def stride(self) -> int:
        """Each shard gives every so many-th piece."""
        return len(self.ranks) - 1

    def number(self, rank: int, position: int) -> int:
        """The number in the shard of `rank` of the piece that is combined at `position`."""
        return position * self.stride + self._first(rank)

    def share(self, rank: int, pieces: int) -> int:
        """How many pieces the shard of `rank` gives to the part, if it has so many."""
        return max(0, -(-(pieces - self._first(rank)) // self.stride))

    def _first(self, rank: int) -> int:
        return self.part - (self.part > self.ranks.index(rank))

    def to_wire(self) -> peer_pb2.ParityPart:
        """Convert to the message, which does not name the version."""
        return peer_pb2.ParityPart(ranks=self.ranks, part=self.part)


class PartDropped(Exception):
    """The version is no longer needed."""


class ParityPart:
    """A part that grows until the shards of all its ranks are in it. Threads add to it.

    Args:
        key: which part it is.
        memory: of `capacity` times PIECE_BYTES bytes, with any content.
        free_memory: called once with the memory, when nothing holds the part any more.
    """

    def __init__(
        self, key: PartKey, memory: SealedMemory, capacity: int, free_memory: Callable[[SealedMemory, int], None]
    ) -> None:
        self.key = key
        self._memory, self._capacity = memory, capacity
        self._free_memory = free_memory
        self._lock = threading.Lock()
        """Held while one piece is added, or the memory is replaced."""
        self._dropped = False
        self._lengths: dict[int, int] = {}
        """By position: how many bytes of the piece are defined. All bytes behind them count as zeros."""
        self._digests: dict[int, bytes] = {}
        """By position: of pieces to which nothing is added any more."""
        self._members: dict[int, tuple[Piece, ...]] = {}
        self._added: dict[int, set[int]] = {}
        """For each rank: the positions of its pieces that are in the part."""
        self.turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """For each rank: held by the one offer of it that adds pieces."""
        self.shard: Shard | None = None
        """The part's pieces, as others fetch them; None: some rank's shard is not in it yet."""
        self._status: ParityStatus | None = None

    @property
    def capacity(self) -> int:
        """For how many pieces there is memory."""
        return self._capacity

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of a rank's shard, all of them; empty: it was not offered yet."""
        return self._members.get(rank, ())

    def begin_rank(self, rank: int, pieces: tuple[Piece, ...]) -> None:
        """A rank's shard is offered.

        Raises:
            CorruptShard: another shard of this rank was offered for the same version.
        """
        if self._members.setdefault(rank, pieces) != pieces:
            raise CorruptShard(f"rank {rank}'s shard of {self.key.version} is not the one that was offered before")
        self._added.setdefault(rank, set())

    def missing(self, rank: int) -> list[int]:
        """The positions of a rank's pieces that were not added yet."""
        count = self.key.share(rank, len(self._members[rank]))
        return [position for position in range(count) if position not in self._added[rank]]

    def replace_memory(self, memory: SealedMemory, capacity: int) -> None:
        """Move to larger memory, if it is larger. A thread does this: it copies what there is."""
        with self._lock:
            if not self._dropped and capacity > self._capacity:
                for position, length in self._lengths.items():
                    start = position * PIECE_BYTES
                    memory.view[start : start + length] = self._memory.view[start : start + length]
                self._memory, memory, self._capacity = memory, self._memory, capacity
        memory.close()

    def add(self, rank: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Add pieces of a rank's shard, each by its position, once. They are verified already.

        Raises:
            PartDropped: the memory is in use for something else.
        """
        for position, data in pieces:
            with self._lock:
                if self._dropped:
                    raise PartDropped(f"{self.key.version} is no longer needed")
                if position in self._added[rank]:
                    continue
                self._add(position, data)
                self._added[rank].add(position)
                if self._is_final(position):
                    self._digests[position] = digest_of(self._piece(position))

    def _add(self, position: int, data: memoryview) -> None:
        start, defined = position * PIECE_BYTES, self._lengths.get(position, 0)
        both = min(defined, len(data))
        if both:
            exclusive_or.add(self._memory.view[start : start + both], data[:both])
        if len(data) > defined:
            self._memory.view[start + defined : start + len(data)] = data[defined:]
            self._lengths[position] = len(data)

    def _piece(self, position: int) -> memoryview:
        start = position * PIECE_BYTES
        return self._memory.view[start : start + self._lengths[position]]

    def _is_final(self, position: int) -> bool:
        """Whether nothing will be added to a piece."""
        return len(self._members) == len(self.key.combined) and all(
            position in self._added[rank] or position >= self.key.share(rank, len(pieces))
            for rank, pieces in self._members.items()
        )

    def try_complete(self) -> bool:
        """Make the part whole, if all ranks' pieces are in it. A thread does this: it digests what is not yet."""
        with self._lock:
            if self._dropped or self.shard is not None or len(self._members) < len(self.key.combined):
                return False
            if any(self.missing(rank) for rank in self._members):
                return False
            for position in self._lengths.keys() - self._digests.keys():
                self._digests[position] = digest_of(self._piece(position))
            pieces = tuple(
                Piece(position * PIECE_BYTES, self._lengths[position], self._digests[position])
                for position in sorted(self._lengths)
            )
            memory, capacity = self._memory, self._capacity
            self.shard = Shard(
                self.key.ranks[0],
                self.key.version,
                TIER_PARITY,
                pieces,
                shard_digest(pieces),
                memory,
                lambda: self._free_memory(memory, capacity),
            )
            return True

    def drop(self) -> None:
        """Free the memory, as soon as nobody reads it any more."""
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
        if self.shard is not None:
            self.shard.release()
        else:
            self._free_memory(self._memory, self._capacity)

    def digests(self) -> list[bytes]:
        """Of each rank's shard, in the order of the ranks; empty for the rank that is not combined. Of a whole part."""
        return [shard_digest(self._members[rank]) if rank in self._members else b"" for rank in self.key.ranks]

    def status(self) -> ParityStatus:
        """A whole part as the agent reports it to the coordinator."""
        if self._status is None:
            self._status = ParityStatus(
                ranks=self.key.ranks,
                version=self.key.version.to_wire(),
                part=self.key.part,
                digests=[digest.hex() for digest in self.digests()],
                bytes=[size_of(self._members.get(rank, ())) for rank in self.key.ranks],
            )
        return self._status


def staged(pieces: Sequence[Piece], window: int, stride: int = 1) -> list[Piece]:
    """The pieces of a shard with their places in memory that holds `window` of every `stride`-th of them at a time."""
    return [
        Piece(number // stride % window * PIECE_BYTES, piece.length, piece.digest)
        for number, piece in enumerate(pieces)
    ]
