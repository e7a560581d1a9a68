"""Shards in this node's memory: which stand whole, who holds on to them, and when their memory may go.

A shard is one rank's state of one version. Its bytes are a slot (tier OWN) or a buddy's copy, of which pieces may be
borrowed from a slot of this node that holds equal bytes. Memory goes back when nobody holds the shard any more: the
shelf, a copy that borrows from it, a transfer or a flush that reads it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.slots import SealedMemory
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN, ShardStatus, Tier

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A run of a shard's bytes and their XXH3-128 (16 bytes)."""

    offset: int
    length: int
    digest: bytes


@dataclass(eq=False)
class Shard:
    """One rank's state of one version, whole and digested.

    `memory` shows the shard's own bytes (borrowed pieces are undefined there); `give_back` is called once, when nobody
    holds the shard any more.
    """

    rank: int
    version: Version
    tier: "Tier.ValueType"
    pieces: tuple[Piece, ...]
    digest: bytes
    memory: SealedMemory
    give_back: Callable[[], None]
    borrowed: dict[int, tuple["Shard", int]] = field(default_factory=dict)
    """Lender and its piece, by number of the piece here; the lender is held."""
    _holders: int = 1

    @property
    def bytes(self) -> int:
        """Size of the shard."""
        return self.memory.size

    def piece(self, number: int) -> memoryview:
        """The bytes of a piece, wherever they stand."""
        piece = self.pieces[number]
        if number in self.borrowed:
            lender, place = self.borrowed[number]
            return lender.piece(place)
        return self.memory.view[piece.offset : piece.offset + piece.length]

    def hold(self) -> "Shard":
        """Keep the memory from going back until `release`.

        Raises:
            RuntimeError: the memory has gone back already.
        """
        if not self._holders:
            raise RuntimeError(f"rank {self.rank}'s shard of {self.version} has been given back")
        self._holders += 1
        return self

    def release(self) -> None:
        """Let go; the last one to do so gives the memory back."""
        self._holders -= 1
        if self._holders:
            return
        lenders, self.borrowed = list(self.borrowed.values()), {}
        self.give_back()
        for lender, _ in lenders:
            lender.release()

    @contextmanager
    def held(self) -> Iterator["Shard"]:
        """Hold the shard for the length of a block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def status(self) -> ShardStatus:
        """As the coordinator hears of it."""
        return ShardStatus(
            rank=self.rank, version=self.version.to_wire(), tier=self.tier, bytes=self.bytes, digest=self.digest.hex()
        )


Key = tuple["Tier.ValueType", int, Version]


class ShardStore:
    """All whole shards of this node."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._shards: dict[Key, Shard] = {}
        self._changed = changed

    def put(self, shard: Shard) -> None:
        """Take a shard in; one that stood in its place is released."""
        before = self._shards.get((shard.tier, shard.rank, shard.version))
        self._shards[shard.tier, shard.rank, shard.version] = shard
        if before is not None:
            before.release()
        self._changed()

    def find(self, rank: int, version: Version) -> Shard | None:
        """The shard of a rank at a version: the rank's own slot before a buddy's copy."""
        return self._shards.get((TIER_OWN, rank, version)) or self._shards.get((TIER_BUDDY, rank, version))

    def own(self, rank: int, version: Version) -> Shard | None:
        """The shard in a slot of this node."""
        return self._shards.get((TIER_OWN, rank, version))

    def copy(self, rank: int, version: Version) -> Shard | None:
        """The copy that this node keeps for another."""
        return self._shards.get((TIER_BUDDY, rank, version))

    def all(self) -> list[Shard]:
        """Every shard, by tier, rank and version."""
        return [self._shards[key] for key in sorted(self._shards)]

    def drop(self, wanted: Callable[[Shard], bool], why: str) -> None:
        """Take off every shard that `wanted` picks."""
        gone = [key for key, shard in self._shards.items() if wanted(shard)]
        for key in gone:
            shard = self._shards.pop(key)
            log.debug("rank %d's shard of %s goes: %s", shard.rank, shard.version, why)
            shard.release()
        if gone:
            self._changed()

    def quarantine(self, shard: Shard, why: str) -> None:
        """Take off a shard whose bytes are not what they were, and all that borrow from it."""
        log.error("rank %d's shard of %s is bad and is no longer offered: %s", shard.rank, shard.version, why)
        self.drop(lambda s: s is shard or any(lender is shard for lender, _ in s.borrowed.values()), why)
