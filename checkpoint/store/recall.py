"""Where a generation's ranks get their state from: this node's memory, another's, or durable storage of the same
version.

Started for all ranks of this node as soon as the order is known, while the ranks still start. Every byte is verified
here before a rank sees it. A rank gets the version of the plan or nothing: versions are never mixed.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import grpc

from muster.checkpoint.format.durable_folders import folder_name
from muster.checkpoint.format.errors import CorruptShard, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import bad_pieces
from muster.checkpoint.store.memory.shards import Piece, Shard, ShardStore
from muster.checkpoint.store.memory.slots import NoMemoryLeft, SealedMemory, SlotPool
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import verify
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_DURABLE, TIER_OWN, Order, RestorePlan, RestoreSource

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RecalledState:
    """What a rank starts from: a shard that stands in a slot of this node, a durable folder, or neither (afresh)."""

    shard: Shard | None = None
    durable_path: str = ""


class Recall:
    """The recalls of one generation on this node.

    Args:
        gang_id, node: who asks.
        shelf, slots: where shards stand and come to stand.
        dial: a stub for a peer's address.
        work: threads.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        slots: SlotPool,
        dial: Callable[[str], "PeerServiceAsyncStub"],
        work: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._slots = slots
        self._dial = dial
        self._work = work
        self._peers: dict[str, str] = {}
        self._tasks: dict[int, asyncio.Task[RecalledState]] = {}

    def start(self, order: Order, ranks: Sequence[int]) -> None:
        """Begin for the ranks of this node; an earlier generation's recalls are given up."""
        self.cancel()
        self._peers = {m.node: m.peer_address for m in order.members}
        for rank in ranks:
            task = asyncio.create_task(self._recall(rank, order.restore), name=f"recall rank {rank}")
            # An error is told to the rank that asks; without one asking it is no news.
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            self._tasks[rank] = task

    async def of(self, rank: int) -> RecalledState:
        """The state of a rank; waits until it stands here.

        Raises:
            RestoreError: no source gave it.
        """
        task = self._tasks.get(rank)
        return await asyncio.shield(task) if task is not None else RecalledState()

    def cancel(self) -> None:
        """Give up what has not come yet."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _recall(self, rank: int, plan: RestorePlan) -> RecalledState:
        version = Version.from_wire(plan.version)
        sources = sorted(
            (s for s in plan.sources if s.rank == rank and s.tier != TIER_DURABLE), key=lambda s: s.node != self._node
        )
        if not plan.sources and (plan.durable_path or not plan.HasField("version")):
            return RecalledState(durable_path=plan.durable_path)
        tried = []
        for source in sources:
            try:
                return RecalledState(await self._from(rank, version, source))
            except (CorruptShard, NoMemoryLeft) as error:
                words = str(error)
            except grpc.aio.AioRpcError as error:
                words = f"{error.code().name}: {error.details()}"
            log.error("rank %d's state at %s can't be had from %s: %s", rank, version, source.node, words)
            tried.append(f"{source.node}: {words}")
        if PurePath(plan.durable_path).name == folder_name(version, self._gang_id):
            return RecalledState(durable_path=plan.durable_path)
        raise RestoreError(f"rank {rank}'s state at {version} can't be had: {'; '.join(tried) or 'no source holds it'}")

    async def _from(self, rank: int, version: Version, source: RestoreSource) -> Shard:
        if source.node == self._node:
            return await self._here(rank, version, source)
        if source.node not in self._peers:
            raise CorruptShard(f"the order names no address for {source.node}")
        return await self._fetch(rank, version, source)

    async def _here(self, rank: int, version: Version, source: RestoreSource) -> Shard:
        shard = self._shard_store.own(rank, version) or self._shard_store.copy(rank, version)
        if shard is None:
            raise CorruptShard("its memory holds no such shard")
        with shard.held():
            if source.digest and shard.digest.hex() != source.digest:
                raise CorruptShard(f"the shard's digest is {shard.digest.hex()}, the order says {source.digest}")
            bad = await self._work(bad_pieces, shard)
            if not bad:
                return shard if shard.tier == TIER_OWN else await self._settle(shard)
        why = f"{len(bad)} of {len(shard.pieces)} pieces don't give their digest"
        self._shard_store.quarantine(shard, why)
        other = self._shard_store.find(rank, version)
        if other is not None:
            return await self._here(rank, version, source)
        raise CorruptShard(why)

    async def _settle(self, copy: Shard) -> Shard:
        """Turn a buddy's copy into a slot of this node: the rank lives here now."""

        def fill(memory: SealedMemory) -> None:
            for n, piece in enumerate(copy.pieces):
                memory.view[piece.offset : piece.offset + piece.length] = copy.piece(n)

        memory = await self._work(self._slots.make, copy.rank, copy.bytes)
        try:
            await self._work(fill, memory)
            return await self.take_in(copy.rank, copy.version, copy.pieces, copy.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def _fetch(self, rank: int, version: Version, origin: RestoreSource) -> Shard:
        request = peer_pb2.FetchRequest(gang_id=self._gang_id, node=self._node, rank=rank, version=version.to_wire())
        stream = self._dial(self._peers[origin.node]).Fetch(request, timeout=FETCH_TIMEOUT_S)
        source = aiter(stream)
        first = await anext(source, None)
        if first is None or not first.HasField("offer"):
            raise CorruptShard("the answer doesn't begin with an offer")
        pieces = transfer.pieces_of_offer(first.offer)
        if (first.offer.rank, Version.from_wire(first.offer.version)) != (rank, version):
            raise CorruptShard(f"the answer is rank {first.offer.rank} of {Version.from_wire(first.offer.version)}")
        if origin.digest and first.offer.digest.hex() != origin.digest:
            raise CorruptShard(f"the shard's digest is {first.offer.digest.hex()}, the order says {origin.digest}")
        memory = await self._work(self._slots.make, rank, first.offer.bytes)
        try:
            await transfer.receive_pieces(source, memory, pieces)
            return await self.take_in(rank, version, pieces, first.offer.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def take_in(
        self, rank: int, version: Version, pieces: tuple[Piece, ...], digest: bytes, memory: SealedMemory
    ) -> Shard:
        """Verify every byte of `memory`, then make it the rank's slot.

        Raises:
            CorruptShard: its bytes don't give their digests.
        """
        await self._work(verify, memory, pieces, range(len(pieces)))
        slot = self._slots.adopt(rank, memory)
        shard = Shard(rank, version, TIER_OWN, pieces, digest, memory, lambda: self._slots.free(slot))
        self._shard_store.put(shard)
        return shard
