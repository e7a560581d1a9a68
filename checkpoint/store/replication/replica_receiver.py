"""The receiver of replicas: answers the offers of other agents, and those who fetch a shard from here.

The receiver fetches the pieces that this node lacks. The ranks of this node may be about to fill their slots with the
same version, and with equal bytes. The receiver then waits a little, because fetching bytes that this node will hold in
a moment would be a waste.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import ShardStore
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import host_of
from muster.checkpoint.store.replication.incoming_pieces import IncomingPieces
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.streams.arrivals import DamagedArrivals
from muster.checkpoint.store.streams.transport import FetchFailed, Holder, PieceTransport
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_BUDDY

FETCH_TIMEOUT_S = 3600.0
"""Seconds for which a shard is kept for one who fetches it. Quiet streams are ended long before."""
LOCAL_SLOT_WAIT_S = 0.2
"""Seconds that an offer waits for slots of this node. The wait delays no commit, because a commit needs these slots."""


class ReplicaReceiver:
    """Takes in the shards of other nodes, and sends shards to the nodes that need them.

    Args:
        gang_id, node: of this agent. Offers of other gangs are refused.
        shard_store: the shards of this node.
        replica_builder: builds the replicas.
        transport: how pieces travel.
        address_of: returns the address ("host:port") of the agent on a node; empty: it is unknown.
        stale_reason: returns why a version is refused; empty if it is not.
        awaits_slot: returns whether a rank of this node may still fill a slot with a version.
        slot_wait_s: seconds that an offer waits for such slots.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        replica_builder: ReplicaBuilder,
        transport: PieceTransport,
        address_of: Callable[[str], str],
        stale_reason: Callable[[Version], str],
        awaits_slot: Callable[[Version], bool],
        slot_wait_s: float = LOCAL_SLOT_WAIT_S,
    ) -> None:
        self._slot_wait_s = slot_wait_s
        self._gang_id = gang_id
        self._node = node
        self._transport = transport
        self._address_of = address_of
        self._shard_store = shard_store
        self._replica_builder = replica_builder
        self._stale_reason = stale_reason
        self._awaits_slot = awaits_slot
        self._incoming = IncomingPieces()
        self._slots_changed = asyncio.Event()

    def notify_slots_changed(self) -> None:
        """Wake all waiting offers: a slot of this node was digested, or will not be."""
        self._slots_changed.set()
        self._slots_changed = asyncio.Event()

    async def offer(self, offer: peer_pb2.ShardOffer) -> peer_pb2.ShardStored:
        """Fetch the pieces that this node lacks. The verified replica is stored when this returns without a refusal."""
        version = shard_offers.version_of_offer(offer)
        if refused := self._refusal(offer.gang_id, version):
            return peer_pb2.ShardStored(refused=refused)
        replica = self._shard_store.replica(offer.rank, version)
        if replica is not None and replica.digest == offer.digest:
            return peer_pb2.ShardStored()  # common for the version that a generation starts from
        try:
            pieces = shard_offers.pieces_of_offer(offer)
            await self._wait_for_slots(version)
            await self._store_replica(offer, version, pieces)
        except (CorruptShard, NoMemoryLeft, FetchFailed) as error:
            return peer_pb2.ShardStored(refused=str(error))
        return peer_pb2.ShardStored(refused=self._drop_if_stale(offer.rank, version))

    async def _store_replica(self, offer: peer_pb2.ShardOffer, version: Version, pieces: tuple[Piece, ...]) -> None:
        missing, arrivals = self._replica_builder.missing_pieces(version, pieces), DamagedArrivals()
        with self._incoming.claim(version, {pieces[n].digest for n in missing}) as (claimed, earlier):
            received = {n for n in missing if pieces[n].digest in claimed}
            memory = self._replica_builder.allocate(offer.rank, offer.bytes, sum(pieces[n].length for n in received))
            try:
                await self._bring(offer, pieces, received, memory, arrivals)
                if earlier:
                    await asyncio.gather(*(over.wait() for over in earlier))
                    # What they have not brought after all.
                    rest = set(self._replica_builder.missing_pieces(version, pieces)) - received
                    await self._bring(offer, pieces, rest, memory, arrivals)
                    received |= rest
            except BaseException:
                self._replica_builder.reuse_or_close(offer.rank, memory)
                raise
            finally:
                self._shard_store.note_damaged(offer.rank, version, TIER_BUDDY, arrivals.by_node)
            # Shielded: a thread works on the memory, and must end before the memory may be reused.
            await asyncio.shield(self._replica_builder.complete(offer.rank, version, memory, pieces, received))

    async def _bring(
        self,
        offer: peer_pb2.ShardOffer,
        pieces: Sequence[Piece],
        numbers: Collection[int],
        memory: SealedMemory,
        arrivals: DamagedArrivals,
    ) -> None:
        """Write pieces of an offer to the memory: those inside it, and the others from the node that offers them."""
        inline = shard_offers.inline_pieces(offer)
        written = inline.keys() & set(numbers)
        for n in written:
            memory.view[pieces[n].offset : pieces[n].offset + pieces[n].length] = inline[n]
        verify_pieces(memory, pieces, written)
        if fetched := sorted(set(numbers) - written):
            await self._transport.fetch([self._holder_of(offer)], pieces, fetched, memory, arrivals)

    def _holder_of(self, offer: peer_pb2.ShardOffer) -> Holder:
        address = self._address_of(offer.node)
        if not address:
            raise FetchFailed(f"no order names {offer.node} as a member yet")
        if not offer.HasField("access"):
            raise FetchFailed("some pieces are not on this node, and the offer names no port to fetch them from")
        return shard_offers.holder_of_offer(offer, host_of(address))

    async def fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncGenerator[peer_pb2.ShardOffer, None]:
        """Offer a shard to the node that needs it, and let it fetch the pieces until it ends this call."""
        version = Version.from_wire(request.version)
        shard = self._shard_store.find(request.rank, version)
        if request.gang_id != self._gang_id or shard is None:
            reason = f"{self._node} holds no shard of rank {request.rank} at {version} of gang {request.gang_id}"
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
            return
        with shard.held(), self._transport.grant(shard) as grant:
            try:
                yield shard_offers.make_offer(self._gang_id, self._node, shard, grant.access)
                await asyncio.sleep(FETCH_TIMEOUT_S)  # the caller ends the call
            finally:
                for where, count in Counter(shard.location(n)[0] for n in grant.changed_numbers).items():
                    self._shard_store.quarantine(where, grant.changed, count)

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
