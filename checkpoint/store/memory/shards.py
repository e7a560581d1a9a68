"""The shards in this node's memory: which are complete, what holds them, and when their memory is freed.

A shard is the state of one rank at one version. Its bytes are in a slot of this node (tier OWN), or in a replica that
this node keeps as buddy (tier BUDDY). A replica may refer to equal pieces in a slot of this node, or in the replica of
another rank, instead of storing them. A shard's memory is freed when nothing holds the shard any more: neither the
shard store, nor a replica that refers to its pieces, nor a transfer or a flush that reads it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import Footer, read_footer
from muster.checkpoint.format.replica_agreement import ReplicaDigest
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.corrupt_copies import CorruptCopies
from muster.checkpoint.store.memory.pieces import Piece, digest_of, replica_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN, ShardStatus, Tier

log = logging.getLogger(__name__)

PieceLocation = tuple["Shard", int]
"""A shard, and the number of a piece in it."""


@dataclass(eq=False)
class Shard:
    """The complete, digested state of one rank at one version.

    `memory`: the shard's own bytes; at pieces in `references` these bytes are undefined.
    `free_memory`: called once, when nothing holds the shard any more.
    `references`: for the number of a piece, where its bytes are instead. The other shard is held.
    """

    rank: int
    version: Version
    tier: "Tier.ValueType"
    pieces: tuple[Piece, ...]
    digest: bytes
    memory: SealedMemory
    free_memory: Callable[[], None]
    references: dict[int, PieceLocation] = field(default_factory=dict)
    _holder_count: int = 1

    @property
    def bytes(self) -> int:
        """Size of the shard."""
        return self.memory.size

    def location(self, number: int) -> PieceLocation:
        """The shard in whose memory the bytes of a piece are: this one, or the one that it refers to."""
        return self.references.get(number, (self, number))

    def piece(self, number: int) -> memoryview:
        """The bytes of a piece."""
        piece = self.pieces[number]
        if number in self.references:
            source, source_number = self.references[number]
            return source.piece(source_number)
        return self.memory.view[piece.offset : piece.offset + piece.length]

    @cached_property
    def _footer(self) -> Footer:
        """The footer, which is in the last piece; an empty one if another node has sent bytes that are no shard."""
        try:
            return read_footer(self.piece(len(self.pieces) - 1), len(self.memory.view))
        except CorruptShard:
            return Footer(0, 0, 0, 0, 0)

    @cached_property
    def replica(self) -> ReplicaDigest:
        """What is compared with the other replicas of this rank's state."""
        return replica_digest(self.pieces, self._footer)

    @property
    def sharded(self) -> bool:
        """Whether another number of ranks needs the shards of all ranks that wrote this version."""
        return self._footer.sharded

    def refers_to(self, other: "Shard") -> bool:
        """Whether some of its bytes are in the memory of `other`."""
        return any(source is other for source, _ in self.references.values())

    def corrupt_pieces(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Those of the numbered pieces whose bytes do not match their digest. None: of all pieces."""
        checked = range(len(self.pieces)) if numbers is None else numbers
        return [n for n in checked if digest_of(self.piece(n)) != self.pieces[n].digest]

    def hold(self) -> "Shard":
        """Keep the memory until `release` is called.

        Raises:
            RuntimeError: the memory has been freed already.
        """
        if not self._holder_count:
            raise RuntimeError(f"the memory of rank {self.rank}'s shard of {self.version} has been freed")
        self._holder_count += 1
        return self

    def release(self) -> None:
        """Undo one `hold`. The last release frees the memory."""
        self._holder_count -= 1
        if self._holder_count:
            return
        references, self.references = list(self.references.values()), {}
        self.free_memory()
        for source, _ in references:
            source.release()

    @contextmanager
    def held(self) -> Iterator["Shard"]:
        """Hold the shard inside a `with` block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def status(self) -> ShardStatus:
        """The shard as the agent reports it to the coordinator."""
        return ShardStatus(
            rank=self.rank,
            version=self.version.to_wire(),
            tier=self.tier,
            bytes=self.bytes,
            digest=self.digest.hex(),
            replica_group=self.replica.group,
            replica_digest=self.replica.digest,
            sharded=self.sharded,
        )


ShardKey = tuple["Tier.ValueType", int, Version]
"""Tier, rank, version."""


class ShardStore:
    """All complete shards in the memory of this node.

    Args:
        on_change: called after shards were added or dropped.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._shards: dict[ShardKey, Shard] = {}
        self._on_change = on_change
        self.on_versions_dropped: Callable[[Callable[[Version], bool]], None] = lambda _: None
        """Called by `drop_versions`, to drop what else is kept of these versions."""
        self.corrupt_copies = CorruptCopies()

    def add(self, shard: Shard) -> None:
        """Add a shard. A shard of the same tier, rank and version is released."""
        before = self._shards.get((shard.tier, shard.rank, shard.version))
        self._shards[shard.tier, shard.rank, shard.version] = shard
        if before is not None:
            before.release()
        self._on_change()

    def find(self, rank: int, version: Version) -> Shard | None:
        """The shard of a rank at a version: from a slot of this node if possible, otherwise a replica."""
        return self.slot_shard(rank, version) or self.replica(rank, version)

    def slot_shard(self, rank: int, version: Version) -> Shard | None:
        """The shard in a slot of this node."""
        return self._shards.get((TIER_OWN, rank, version))

    def replica(self, rank: int, version: Version) -> Shard | None:
        """The replica that this node keeps for another node."""
        return self._shards.get((TIER_BUDDY, rank, version))

    def all(self) -> list[Shard]:
        """Every shard, sorted by tier, rank and version."""
        return [self._shards[key] for key in sorted(self._shards)]

    def drop(self, is_dropped: Callable[[Shard], bool], reason: str) -> None:
        """Remove every shard for which `is_dropped` returns True."""
        dropped = [key for key, shard in self._shards.items() if is_dropped(shard)]
        for key in dropped:
            shard = self._shards.pop(key)
            log.debug("rank %d's shard of %s is dropped: %s", shard.rank, shard.version, reason)
            shard.release()
        if dropped:
            self._on_change()

    def drop_versions(self, is_dropped: Callable[[Version], bool], reason: str) -> None:
        """Remove every shard, and what else is kept, of the versions for which `is_dropped` returns True."""
        self.drop(lambda shard: is_dropped(shard.version), reason)
        self.on_versions_dropped(is_dropped)

    def quarantine(self, shard: Shard, reason: str, corrupt: int = 1) -> None:
        """Remove a shard whose bytes have changed, and every replica that refers to its pieces. The status tells of it.

        `corrupt`: how many pieces do not match, as far as they were checked.
        """
        if not any(s is shard or s.refers_to(shard) for s in self._shards.values()):
            return
        log.error("rank %d's shard of %s is corrupt and no longer used: %s", shard.rank, shard.version, reason)
        self.corrupt_copies.note(shard.rank, shard.version, shard.tier, corrupt, len(shard.pieces))
        self.drop(lambda s: s is shard or s.refers_to(shard), reason)

    def note_damaged(self, rank: int, version: Version, tier: "Tier.ValueType", damaged: Mapping[str, int]) -> None:
        """Pieces that did not match have come for a copy in this node's memory. `damaged`: how many, by node."""
        for node, count in damaged.items():
            self.corrupt_copies.note(rank, version, tier, count, 0, node)
        if damaged:
            self._on_change()
