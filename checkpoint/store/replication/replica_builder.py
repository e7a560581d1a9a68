"""Building replicas of other nodes' shards from pieces that are in this node's memory and pieces that were received.

Some pieces need no transfer, because replicas of data parallelism hold equal bytes:

- A slot of this node, or the replica of another rank, holds the piece at the same version: the replica refers to it.
  Both are dropped by the same commit.
- Only a shard of an older version holds the piece: the bytes are copied inside this node.

Data parallelism without sharding therefore sends little more than each rank's own objects.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory, available_bytes
from muster.checkpoint.store.memory.shards import PieceLocation, Shard, ShardStore
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN
from muster.wording import counted


class ReplicaBuilder:
    """Builds the replicas of this node and reuses their memory.

    Args:
        gang_id: part of the names of the memfds.
        shard_store: where pieces are looked up, and complete replicas are added.
        run_in_thread: runs a function in a thread.
    """

    def __init__(self, gang_id: str, shard_store: ShardStore, run_in_thread: WorkerThreads) -> None:
        self._gang_id = gang_id
        self._shard_store = shard_store
        self._run_in_thread = run_in_thread
        self._reusable: dict[int, SealedMemory] = {}
        self._replicated_ranks: frozenset[int] = frozenset()
        self._allocated_count = 0
        self._closed = False

    def set_replicated_ranks(self, ranks: Iterable[int]) -> None:
        """Set the ranks whose replicas belong on this node. Reusable memory of all other ranks is closed."""
        self._replicated_ranks = frozenset(ranks)
        for rank in self._reusable.keys() - self._replicated_ranks:
            self._reusable.pop(rank).close()

    def missing_pieces(self, version: Version, pieces: Sequence[Piece]) -> list[int]:
        """Numbers of the pieces that no shard in this node's memory holds."""
        locations = self._piece_locations(version)
        return [n for n, piece in enumerate(pieces) if piece.digest not in locations]

    def allocate(self, rank: int, size: int, incoming_bytes: int) -> SealedMemory:
        """Memory for a replica of `size` bytes, of which `incoming_bytes` will be written.

        Raises:
            NoMemoryLeft: there is too little memory.
        """
        if incoming_bytes > available_bytes():
            raise NoMemoryLeft(f"no memory for {incoming_bytes >> 20} MiB of rank {rank}'s replica")
        reusable = self._reusable.pop(rank, None)
        if reusable is not None and reusable.size == size:
            return reusable
        if reusable is not None:
            reusable.close()
        self._allocated_count += 1
        return SealedMemory(f"muster-{self._gang_id}-r{rank}-b{self._allocated_count}", size, sparse=True)

    async def complete(
        self, rank: int, version: Version, memory: SealedMemory, pieces: tuple[Piece, ...], received: Collection[int]
    ) -> Shard:
        """Complete a replica in `memory`, where the pieces `received` are written and verified, and store it.

        Raises:
            CorruptShard: a piece has changed in the memory of this node, or is nowhere on it. `memory` is kept for the
                next attempt.
        """
        referenced: dict[int, PieceLocation] = {}
        copied: dict[int, PieceLocation] = {}
        try:
            self._locate_rest(pieces, set(received), version, referenced, copied)
            for n in referenced:
                memory.free_pages(pieces[n].offset, pieces[n].length)
            damaged = await self._run_in_thread(_copy, memory, pieces, copied)
            if damaged:
                self._quarantine(damaged, copied)
                raise CorruptShard(
                    f"{counted(len(damaged), 'piece has', 'pieces have')} changed in this node's memory: offer again"
                )
        except CorruptShard:
            _release(referenced)
            self.reuse_or_close(rank, memory)
            raise
        finally:
            _release(copied)
        shard = Shard(
            rank,
            version,
            TIER_BUDDY,
            pieces,
            shard_digest(pieces),
            memory,
            lambda: self.reuse_or_close(rank, memory),
            referenced,
        )
        self._shard_store.add(shard)
        return shard

    def _locate_rest(
        self,
        pieces: Sequence[Piece],
        received: set[int],
        version: Version,
        referenced: dict[int, PieceLocation],
        copied: dict[int, PieceLocation],
    ) -> None:
        """Sort the pieces that were not received into pieces to refer to and pieces to copy. Hold their shards."""
        locations = self._piece_locations(version)
        for n, piece in enumerate(pieces):
            if n in received:
                continue
            if piece.digest not in locations:
                raise CorruptShard(f"piece {n} is no longer in this node's memory: offer again")
            source, source_number = locations[piece.digest]
            target = referenced if source.version == version else copied
            target[n] = (source.hold(), source_number)

    def _piece_locations(self, version: Version) -> dict[bytes, PieceLocation]:
        """Where each digest is found. A location that a replica of `version` can refer to is preferred, and of these
        one in a slot."""
        locations: dict[bytes, PieceLocation] = {}
        for shard in sorted(self._shard_store.all(), key=lambda s: (s.version == version) * (1 + (s.tier == TIER_OWN))):
            locations.update({piece.digest: shard.location(n) for n, piece in enumerate(shard.pieces)})
        return locations

    def _quarantine(self, damaged: Collection[int], copied: dict[int, PieceLocation]) -> None:
        """Take the shards out of use whose pieces no longer match. The next offer finds these pieces missing."""
        counts = Counter(copied[n][0] for n in damaged)
        for source, count in counts.items():
            self._shard_store.quarantine(source, f"{counted(count, 'piece')} did not match in the copy", count)

    def reuse_or_close(self, rank: int, memory: SealedMemory) -> None:
        """Keep one memory for the rank's next replica. Close further ones, and those of ranks replicated elsewhere."""
        if rank in self._reusable or rank not in self._replicated_ranks or self._closed:
            memory.close()
        else:
            self._reusable[rank] = memory

    def close(self) -> None:
        """Close the reusable memory, and from now on the memory of every dropped replica."""
        self._closed = True
        for memory in self._reusable.values():
            memory.close()
        self._reusable.clear()


def _release(locations: dict[int, PieceLocation]) -> None:
    for shard, _ in locations.values():
        shard.release()


def _copy(memory: SealedMemory, pieces: Sequence[Piece], copied: dict[int, PieceLocation]) -> list[int]:
    """Copy pieces into their places; returns the numbers of those that do not match their digest there."""
    damaged = []
    for n, (source, source_number) in copied.items():
        place = memory.view[pieces[n].offset : pieces[n].offset + pieces[n].length]
        place[:] = source.piece(source_number)
        if digest_of(place) != pieces[n].digest:
            damaged.append(n)
    return damaged
