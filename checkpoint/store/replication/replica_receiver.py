"""The second copy: this node's shards go to its buddy, and the shards of those whose buddy it is come here.

An offer names every piece's digest, and holds the bytes of short ones: replicas then need no second call. The receiver
answers which pieces it has nowhere; where its own ranks are about to fill their slots for that version, it waits a
little rather than ask for bytes that it will hold in a moment.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import NoMemoryLeft
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.v1 import peer_pb2

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

LOCAL_SLOT_WAIT_S = 0.2
"""How long an offer waits for the slots of this node. It delays no commit: that needs the same slots."""

OFFER_TIMEOUT_S = 10.0
PUT_TIMEOUT_S = 120.0


class ReplicaRefused(Exception):
    """The other side doesn't take the shard, in words."""


async def replicate(gang_id: str, node: str, shard: Shard, stub: "PeerServiceAsyncStub") -> int:
    """Bring a second copy of `shard` to the buddy behind `stub`.

    Returns:
        How many bytes of pieces were sent.

    Raises:
        ReplicaRefused: the buddy won't have it. grpc.aio.AioRpcError: it can't be reached.
        CorruptShard: the shard's own bytes have changed.
    """
    with shard.held():
        along = sum(piece.length for piece in shard.pieces if piece.length <= transfer.INLINE_PIECE_BYTES)
        need = await stub.Offer(transfer.make_offer(gang_id, node, shard, short=True), timeout=OFFER_TIMEOUT_S)
        if need.refused:
            raise ReplicaRefused(need.refused)
        if not need.missing:
            return along
        offer = transfer.make_offer(gang_id, node, shard)
        stored = await stub.Put(transfer.shard_messages(offer, shard, need.missing), timeout=PUT_TIMEOUT_S)
    if stored.refused:
        raise ReplicaRefused(stored.refused)
    return along + sum(shard.pieces[n].length for n in need.missing)


class ReplicaReceiver:
    """Takes the shards of others in.

    Args:
        gang_id: offers of other gangs are refused.
        shelf, copies: where shards stand, where copies are built.
        stale: why a version is refused, in words; empty where it isn't.
        awaited: whether a rank of this node may still fill a slot with that version.
    """

    def __init__(
        self,
        gang_id: str,
        shard_store: ShardStore,
        replica_builder: ReplicaBuilder,
        stale: Callable[[Version], str],
        awaited: Callable[[Version], bool],
    ) -> None:
        self._gang_id = gang_id
        self._shard_store = shard_store
        self._replica_builder = replica_builder
        self._stale = stale
        self._awaited = awaited
        self._news = asyncio.Event()

    def news(self) -> None:
        """A slot of this node was digested, or won't be: whoever waits looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def offer(self, offer: peer_pb2.ShardOffer) -> peer_pb2.ShardNeed:
        """Say what is missing of a shard; where nothing is, its copy stands, verified, when this returns."""
        version = transfer.version_of_offer(offer)
        if refused := self._refusal(offer.gang_id, version):
            return peer_pb2.ShardNeed(refused=refused)
        copy = self._shard_store.copy(offer.rank, version)
        if copy is not None and copy.digest == offer.digest:
            return peer_pb2.ShardNeed()  # where a generation starts from a version, most copies stand already
        try:
            pieces = transfer.pieces_of_offer(offer)
            await self._wait_for(version)
            missing, short = self._replica_builder.missing(version, pieces), transfer.inline_pieces(offer)
            if short.keys() >= set(missing):
                memory = self._replica_builder.begin(offer.rank, offer.bytes, sum(pieces[n].length for n in missing))
                for n in missing:
                    memory.view[pieces[n].offset : pieces[n].offset + pieces[n].length] = short[n]
                came, missing = missing, []
                await asyncio.shield(self._replica_builder.finish(offer.rank, version, memory, pieces, came))
        except (CorruptShard, NoMemoryLeft) as error:
            return peer_pb2.ShardNeed(refused=str(error))
        return peer_pb2.ShardNeed(missing=missing, refused=self._withdraw(offer.rank, version))

    async def put(self, stream: AsyncIterable[peer_pb2.ShardData]) -> peer_pb2.ShardStored:
        """Take in the missing pieces of a shard; its copy stands, verified, when this returns without refusal."""
        source = aiter(stream)
        first = await anext(source, None)
        if first is None or not first.HasField("offer"):
            return peer_pb2.ShardStored(refused="the first message must hold the offer")
        offer, version = first.offer, transfer.version_of_offer(first.offer)
        if refused := self._refusal(offer.gang_id, version):
            return peer_pb2.ShardStored(refused=refused)
        try:
            await self._take_in(offer, version, source)
        except (CorruptShard, NoMemoryLeft) as error:
            return peer_pb2.ShardStored(refused=str(error))
        return peer_pb2.ShardStored(refused=self._withdraw(offer.rank, version))

    async def _take_in(
        self, offer: peer_pb2.ShardOffer, version: Version, source: AsyncIterable[peer_pb2.ShardData]
    ) -> None:
        pieces = transfer.pieces_of_offer(offer)
        incoming = sum(pieces[n].length for n in self._replica_builder.missing(version, pieces))
        memory = self._replica_builder.begin(offer.rank, offer.bytes, incoming)
        try:
            came = await transfer.receive_pieces(source, memory, pieces)
        except BaseException:
            self._replica_builder.put_back(offer.rank, memory)
            raise
        # A caller that is gone doesn't end this: a thread is at work on the memory.
        await asyncio.shield(self._replica_builder.finish(offer.rank, version, memory, pieces, came))

    async def fetch(
        self, request: peer_pb2.FetchRequest, node: str, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[peer_pb2.ShardData]:
        """Send a whole shard to the node that needs it."""
        version = Version.from_wire(request.version)
        shard = self._shard_store.find(request.rank, version)
        if request.gang_id != self._gang_id or shard is None:
            words = f"{node} holds no shard of rank {request.rank} at {version} of gang {request.gang_id}"
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
            return
        try:
            with shard.held():
                offer = transfer.make_offer(self._gang_id, node, shard)
                async for message in transfer.shard_messages(offer, shard, range(len(shard.pieces))):
                    yield message
        except CorruptShard as error:
            self._shard_store.quarantine(shard, str(error))
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))

    def _refusal(self, gang_id: str, version: Version) -> str:
        if gang_id != self._gang_id:
            return f"this agent belongs to gang {self._gang_id}, not {gang_id}"
        return self._stale(version)

    def _withdraw(self, rank: int, version: Version) -> str:
        """Things may have moved on while a copy was built: then it goes again."""
        why = self._stale(version)
        if why:
            self._shard_store.drop(lambda s: s is self._shard_store.copy(rank, version), why)
        return why

    async def _wait_for(self, version: Version) -> None:
        end = asyncio.get_running_loop().time() + LOCAL_SLOT_WAIT_S
        while self._awaited(version):
            left = end - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                return
