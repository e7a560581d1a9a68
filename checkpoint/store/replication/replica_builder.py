"""Copies of other nodes' shards, as the buddy keeps them: built from pieces that stand here and pieces that came.

A piece that a slot of this node holds at the same version is borrowed: both go at the same commit. A piece that only
an older shard holds is copied here, without the network. So plain data parallelism sends little more than each rank's
own objects.
"""

from collections.abc import Iterable, Sequence

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import digest_of, shard_digest
from muster.checkpoint.store.memory.shards import Piece, Shard, ShardStore
from muster.checkpoint.store.memory.slots import NoMemoryLeft, SealedMemory, available_bytes
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN

Place = tuple[Shard, int]
"""A shard and the number of a piece in it."""


class ReplicaBuilder:
    """The memory of the copies on this node.

    Args:
        gang_id: goes into the names of the memfds.
        shelf: where shards are looked up and copies put.
        work: runs a function in a thread.
    """

    def __init__(self, gang_id: str, shard_store: ShardStore, work: WorkerThreads) -> None:
        self._gang_id = gang_id
        self._shard_store = shard_store
        self._work = work
        self._spare: dict[int, SealedMemory] = {}
        self._expected: frozenset[int] = frozenset()
        self._made = 0
        self._closed = False

    def expect(self, ranks: Iterable[int]) -> None:
        """From now on copies of these ranks come here; what is spare for others is given back."""
        self._expected = frozenset(ranks)
        for rank in self._spare.keys() - self._expected:
            self._spare.pop(rank).close()

    def missing(self, version: Version, pieces: Sequence[Piece]) -> list[int]:
        """Numbers of the pieces that stand nowhere in this node's memory."""
        known = self._known(version)
        return [n for n, piece in enumerate(pieces) if piece.digest not in known]

    def begin(self, rank: int, size: int, incoming: int) -> SealedMemory:
        """Memory for a copy of `size` bytes, of which `incoming` will be written. Raises NoMemoryLeft."""
        if incoming > available_bytes():
            raise NoMemoryLeft(f"no room for {incoming >> 20} MiB of rank {rank}'s copy")
        spare = self._spare.pop(rank, None)
        if spare is not None and spare.size == size:
            return spare
        if spare is not None:
            spare.close()
        self._made += 1
        return SealedMemory(f"muster-{self._gang_id}-r{rank}-b{self._made}", size, sparse=True)

    async def finish(
        self, rank: int, version: Version, memory: SealedMemory, pieces: tuple[Piece, ...], came: list[int]
    ) -> Shard:
        """Complete a copy in `memory` where the pieces `came` are written; it goes onto the shelf once all is verified.

        Raises:
            CorruptShard: a piece came damaged, or was here and is here no longer; the memory is kept for the next try.
        """
        borrowed: dict[int, Place] = {}
        copied: dict[int, Place] = {}
        try:
            self._find_rest(pieces, set(came), version, borrowed, copied)
            for n in borrowed:
                memory.forget(pieces[n].offset, pieces[n].length)
            await self._work(_fill, memory, pieces, copied, [*came, *copied])
        except CorruptShard:
            _release(borrowed)
            self.put_back(rank, memory)
            raise
        finally:
            _release(copied)
        digest = shard_digest(pieces)
        shard = Shard(rank, version, TIER_BUDDY, pieces, digest, memory, lambda: self.put_back(rank, memory), borrowed)
        self._shard_store.put(shard)
        return shard

    def _find_rest(
        self,
        pieces: Sequence[Piece],
        came: set[int],
        version: Version,
        borrowed: dict[int, Place],
        copied: dict[int, Place],
    ) -> None:
        """Sort the pieces that didn't come into those to borrow and those to copy; their shards are held."""
        known = self._known(version)
        for n, piece in enumerate(pieces):
            if n in came:
                continue
            if piece.digest not in known:
                raise CorruptShard(f"piece {n} was here and is gone: offer again")
            lender, place = known[piece.digest]
            kind = borrowed if lender.tier == TIER_OWN and lender.version == version else copied
            kind[n] = (lender.hold(), place)

    def _known(self, version: Version) -> dict[bytes, Place]:
        """Where each digest stands; places that can be borrowed from win."""
        known: dict[bytes, Place] = {}
        for shard in sorted(self._shard_store.all(), key=lambda s: s.tier == TIER_OWN and s.version == version):
            known.update({piece.digest: (shard, n) for n, piece in enumerate(shard.pieces)})
        return known

    def put_back(self, rank: int, memory: SealedMemory) -> None:
        """Keep one memory a rank for its next copy; free what is more, and what no copy is expected for."""
        if rank in self._spare or rank not in self._expected or self._closed:
            memory.close()
        else:
            self._spare[rank] = memory

    def close(self) -> None:
        """Give the spare memory back, and from now on all that comes."""
        self._closed = True
        for memory in self._spare.values():
            memory.close()
        self._spare.clear()


def _release(places: dict[int, Place]) -> None:
    for shard, _ in places.values():
        shard.release()


def _fill(memory: SealedMemory, pieces: Sequence[Piece], copied: dict[int, Place], written: Iterable[int]) -> None:
    for n, (lender, place) in copied.items():
        memory.view[pieces[n].offset : pieces[n].offset + pieces[n].length] = lender.piece(place)
    verify(memory, pieces, written)


def verify(memory: SealedMemory, pieces: Sequence[Piece], numbers: Iterable[int]) -> None:
    """Check that the numbered pieces stand in `memory` as their digests say.

    Raises:
        CorruptShard: one doesn't.
    """
    for n in numbers:
        piece = pieces[n]
        if digest_of(memory.view[piece.offset : piece.offset + piece.length]) != piece.digest:
            raise CorruptShard(f"piece {n} (offset {piece.offset}, {piece.length} bytes) arrived damaged")
