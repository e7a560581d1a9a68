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
from muster.checkpoint.format.errors import BadShard, RestoreError
from muster.checkpoint.format.versions import Stamp
from muster.checkpoint.store.memory.pieces import bad_pieces
from muster.checkpoint.store.memory.shards import Piece, Shard, Shelf
from muster.checkpoint.store.memory.slots import Memory, NoMemory, Slots
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import verify
from muster.daemon.host.worker_threads import Workers
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_DURABLE, TIER_OWN, Order, RestorePlan, RestoreSource

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Recalled:
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
        shelf: Shelf,
        slots: Slots,
        dial: Callable[[str], "PeerServiceAsyncStub"],
        work: Workers,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shelf = shelf
        self._slots = slots
        self._dial = dial
        self._work = work
        self._peers: dict[str, str] = {}
        self._tasks: dict[int, asyncio.Task[Recalled]] = {}

    def start(self, order: Order, ranks: Sequence[int]) -> None:
        """Begin for the ranks of this node; an earlier generation's recalls are given up."""
        self.cancel()
        self._peers = {m.node: m.peer_address for m in order.members}
        for rank in ranks:
            task = asyncio.create_task(self._recall(rank, order.restore), name=f"recall rank {rank}")
            # An error is told to the rank that asks; without one asking it is no news.
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            self._tasks[rank] = task

    async def of(self, rank: int) -> Recalled:
        """The state of a rank; waits until it stands here.

        Raises:
            RestoreError: no source gave it.
        """
        task = self._tasks.get(rank)
        return await asyncio.shield(task) if task is not None else Recalled()

    def cancel(self) -> None:
        """Give up what has not come yet."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _recall(self, rank: int, plan: RestorePlan) -> Recalled:
        stamp = Stamp.of(plan.version)
        sources = sorted(
            (s for s in plan.sources if s.rank == rank and s.tier != TIER_DURABLE), key=lambda s: s.node != self._node
        )
        if not plan.sources and (plan.durable_path or not plan.HasField("version")):
            return Recalled(durable_path=plan.durable_path)
        tried = []
        for source in sources:
            try:
                return Recalled(await self._from(rank, stamp, source))
            except (BadShard, NoMemory) as error:
                words = str(error)
            except grpc.aio.AioRpcError as error:
                words = f"{error.code().name}: {error.details()}"
            log.error("rank %d's state at %s can't be had from %s: %s", rank, stamp, source.node, words)
            tried.append(f"{source.node}: {words}")
        if PurePath(plan.durable_path).name == folder_name(stamp, self._gang_id):
            return Recalled(durable_path=plan.durable_path)
        raise RestoreError(f"rank {rank}'s state at {stamp} can't be had: {'; '.join(tried) or 'no source holds it'}")

    async def _from(self, rank: int, stamp: Stamp, source: RestoreSource) -> Shard:
        if source.node == self._node:
            return await self._here(rank, stamp, source)
        if source.node not in self._peers:
            raise BadShard(f"the order names no address for {source.node}")
        return await self._fetch(rank, stamp, source)

    async def _here(self, rank: int, stamp: Stamp, source: RestoreSource) -> Shard:
        shard = self._shelf.own(rank, stamp) or self._shelf.copy(rank, stamp)
        if shard is None:
            raise BadShard("its memory holds no such shard")
        with shard.held():
            if source.digest and shard.digest.hex() != source.digest:
                raise BadShard(f"the shard's digest is {shard.digest.hex()}, the order says {source.digest}")
            bad = await self._work(bad_pieces, shard)
            if not bad:
                return shard if shard.tier == TIER_OWN else await self._settle(shard)
        why = f"{len(bad)} of {len(shard.pieces)} pieces don't give their digest"
        self._shelf.quarantine(shard, why)
        other = self._shelf.find(rank, stamp)
        if other is not None:
            return await self._here(rank, stamp, source)
        raise BadShard(why)

    async def _settle(self, copy: Shard) -> Shard:
        """Turn a buddy's copy into a slot of this node: the rank lives here now."""

        def fill(memory: Memory) -> None:
            for n, piece in enumerate(copy.pieces):
                memory.view[piece.offset : piece.offset + piece.length] = copy.piece(n)

        memory = await self._work(self._slots.make, copy.rank, copy.bytes)
        try:
            await self._work(fill, memory)
            return await self.take_in(copy.rank, copy.stamp, copy.pieces, copy.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def _fetch(self, rank: int, stamp: Stamp, origin: RestoreSource) -> Shard:
        request = peer_pb2.FetchRequest(gang_id=self._gang_id, node=self._node, rank=rank, version=stamp.version())
        stream = self._dial(self._peers[origin.node]).Fetch(request, timeout=FETCH_TIMEOUT_S)
        source = aiter(stream)
        first = await anext(source, None)
        if first is None or not first.HasField("offer"):
            raise BadShard("the answer doesn't begin with an offer")
        pieces = transfer.pieces_of(first.offer)
        if (first.offer.rank, Stamp.of(first.offer.version)) != (rank, stamp):
            raise BadShard(f"the answer is rank {first.offer.rank} of {Stamp.of(first.offer.version)}")
        if origin.digest and first.offer.digest.hex() != origin.digest:
            raise BadShard(f"the shard's digest is {first.offer.digest.hex()}, the order says {origin.digest}")
        memory = await self._work(self._slots.make, rank, first.offer.bytes)
        try:
            await transfer.receive(source, memory, pieces)
            return await self.take_in(rank, stamp, pieces, first.offer.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def take_in(self, rank: int, stamp: Stamp, pieces: tuple[Piece, ...], digest: bytes, memory: Memory) -> Shard:
        """Verify every byte of `memory`, then make it the rank's slot.

        Raises:
            BadShard: its bytes don't give their digests.
        """
        await self._work(verify, memory, pieces, range(len(pieces)))
        slot = self._slots.adopt(rank, memory)
        shard = Shard(rank, stamp, TIER_OWN, pieces, digest, memory, lambda: self._slots.free(slot))
        self._shelf.put(shard)
        return shard
