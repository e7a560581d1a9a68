"""The receiver of replicas: answers the offers, puts and fetches of other agents.

The receiver answers an offer with the pieces that this node lacks. The ranks of this node may be about to fill their
slots with the same version, and with equal bytes. The receiver then waits a little, because asking for bytes that this
node will hold in a moment would be a waste.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft
from muster.checkpoint.store.memory.shards import ShardStore
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.v1 import peer_pb2

LOCAL_SLOT_WAIT_S = 0.2
"""Seconds that an offer waits for slots of this node. The wait delays no commit, because a commit needs these slots."""


class ReplicaReceiver:
    """Takes in the shards of other nodes, and sends shards to the nodes that need them.

    Args:
        gang_id: offers of other gangs are refused.
        shard_store: the shards of this node.
        replica_builder: builds the replicas.
        stale_reason: returns why a version is refused; empty if it is not.
        awaits_slot: returns whether a rank of this node may still fill a slot with a version.
        slot_wait_s: seconds that an offer waits for such slots.
    """

    def __init__(
        self,
        gang_id: str,
        shard_store: ShardStore,
        replica_builder: ReplicaBuilder,
        stale_reason: Callable[[Version], str],
        awaits_slot: Callable[[Version], bool],
        slot_wait_s: float = LOCAL_SLOT_WAIT_S,
    ) -> None:
        self._slot_wait_s = slot_wait_s
        self._gang_id = gang_id
        self._shard_store = shard_store
        self._replica_builder = replica_builder
        self._stale_reason = stale_reason
        self._awaits_slot = awaits_slot
        self._slots_changed = asyncio.Event()
        self._offered: dict[int, tuple[Version, bytes]] = {}
        """By rank: the version and the digest of the newest offer."""

    def notify_slots_changed(self) -> None:
        """Wake all waiting offers: a slot of this node was digested, or will not be."""
        self._slots_changed.set()
        self._slots_changed = asyncio.Event()

    async def offer(self, offer: peer_pb2.ShardOffer) -> peer_pb2.ShardNeed:
        """Answer which pieces are missing. If none is, the verified replica is stored when this returns."""
        version = transfer.version_of_offer(offer)
        if refused := self._refusal(offer.gang_id, version):
            return peer_pb2.ShardNeed(refused=refused)
        replica = self._shard_store.replica(offer.rank, version)
        if replica is not None and replica.digest == offer.digest:
            return peer_pb2.ShardNeed()  # common for the version that a generation starts from
        self._offered[offer.rank] = (version, offer.digest)
        try:
            pieces = transfer.pieces_of_offer(offer)
            await self._wait_for_slots(version)
            missing, inline = self._replica_builder.missing_pieces(version, pieces), transfer.inline_pieces(offer)
            if inline.keys() >= set(missing):
                incoming_bytes = sum(pieces[n].length for n in missing)
                memory = self._replica_builder.allocate(offer.rank, offer.bytes, incoming_bytes)
                for n in missing:
                    memory.view[pieces[n].offset : pieces[n].offset + pieces[n].length] = inline[n]
                received, missing = missing, []
                await asyncio.shield(self._replica_builder.complete(offer.rank, version, memory, pieces, received))
        except (CorruptShard, NoMemoryLeft) as error:
            return peer_pb2.ShardNeed(refused=str(error))
        return peer_pb2.ShardNeed(missing=missing, refused=self._drop_if_stale(offer.rank, version))

    async def put(self, stream: AsyncIterable[peer_pb2.ShardData]) -> peer_pb2.ShardStored:
        """Receive the missing pieces. The verified replica is stored when this returns without a refusal.

        The pieces may come in plain text, and their digests with them. So the shard must have been offered before, with
        the same digest: an offer comes over TLS.
        """
        source = aiter(stream)
        first = await anext(source, None)
        if first is None or not first.HasField("offer"):
            return peer_pb2.ShardStored(refused="the first message must hold the offer")
        offer, version = first.offer, transfer.version_of_offer(first.offer)
        if refused := self._refusal(offer.gang_id, version):
            return peer_pb2.ShardStored(refused=refused)
        if self._offered.get(offer.rank) != (version, offer.digest):
            return peer_pb2.ShardStored(refused=f"rank {offer.rank} at {version}: these digests were not offered")
        try:
            await self._receive_replica(offer, version, source)
        except (CorruptShard, NoMemoryLeft) as error:
            return peer_pb2.ShardStored(refused=str(error))
        return peer_pb2.ShardStored(refused=self._drop_if_stale(offer.rank, version))

    async def _receive_replica(
        self, offer: peer_pb2.ShardOffer, version: Version, source: AsyncIterable[peer_pb2.ShardData]
    ) -> None:
        pieces = transfer.pieces_of_offer(offer)
        incoming_bytes = sum(pieces[n].length for n in self._replica_builder.missing_pieces(version, pieces))
        memory = self._replica_builder.allocate(offer.rank, offer.bytes, incoming_bytes)
        try:
            received = await transfer.receive_pieces(source, memory, pieces)
        except BaseException:
            self._replica_builder.reuse_or_close(offer.rank, memory)
            raise
        # Shielded: a thread works on the memory, and must end before the memory may be reused.
        await asyncio.shield(self._replica_builder.complete(offer.rank, version, memory, pieces, received))

    async def fetch(
        self, request: peer_pb2.FetchRequest, node: str, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[peer_pb2.ShardData]:
        """Send a whole shard to the node that needs it."""
        version = Version.from_wire(request.version)
        shard = self._shard_store.find(request.rank, version)
        if request.gang_id != self._gang_id or shard is None:
            reason = f"{node} holds no shard of rank {request.rank} at {version} of gang {request.gang_id}"
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
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
        return self._stale_reason(version)

    def _drop_if_stale(self, rank: int, version: Version) -> str:
        """Drop a replica whose version became stale while the replica was built; returns the reason."""
        reason = self._stale_reason(version)
        if reason:
            self._shard_store.drop(lambda shard: shard is self._shard_store.replica(rank, version), reason)
        return reason

    async def _wait_for_slots(self, version: Version) -> None:
        deadline = asyncio.get_running_loop().time() + self._slot_wait_s
        while self._awaits_slot(version):
            remaining_s = deadline - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(remaining_s):
                    await self._slots_changed.wait()
            except TimeoutError:
                return
