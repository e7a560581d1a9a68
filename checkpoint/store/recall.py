"""Recall: brings the shards that a generation starts from into slots of the nodes that run the ranks.

The sources are this node's memory, another node's memory, and a durable folder of the same version. The recall starts
for all ranks of this node when the order arrives, while the rank processes still start. Every byte is verified before a
rank can see it. A rank gets exactly the version of the restore plan, or an error: versions are never mixed.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

import grpc

from muster.checkpoint.format.durable_folders import folder_name
from muster.checkpoint.format.errors import CorruptShard, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import SlotPool
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import Dial, host_of
from muster.checkpoint.store.streams.transport import FetchFailed, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_DURABLE, TIER_OWN, Order, RestorePlan, RestoreSource

log = logging.getLogger(__name__)

PART_PIECES = 16
"""Pieces that a thread verifies or copies at least: 64 MiB, some milliseconds."""
OFFER_TIMEOUT_S = 20.0
"""Seconds for a holder to answer. The transfer itself may take long: only quiet streams end it."""


@dataclass(frozen=True)
class RecalledState:
    """What a rank starts from: a shard in a slot of this node, or a durable folder, or neither (a fresh start)."""

    shard: Shard | None = None
    durable_path: str = ""


class Recall:
    """The recalls of one generation on this node.

    Args:
        gang_id, node: the gang and the node of this agent.
        shard_store, slots: where shards are found, and where recalled shards are added.
        dial: returns a stub for the agent on a node.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        slots: SlotPool,
        dial: Dial,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._slots = slots
        self._dial = dial
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._peer_addresses: dict[str, str] = {}
        self._tasks: dict[int, asyncio.Task[RecalledState]] = {}

    def start(self, order: Order, ranks: Sequence[int]) -> None:
        """Start the recalls for the ranks of this node. Recalls of an earlier generation are cancelled."""
        self.cancel()
        self._peer_addresses = {member.node: member.peer_address for member in order.members}
        for rank in ranks:
            task = asyncio.create_task(self._recall(rank, order.restore), name=f"recall rank {rank}")
            # `wait_for` raises the error for the rank that asks. Without such a rank, asyncio must not log the error.
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            self._tasks[rank] = task

    async def wait_for(self, rank: int) -> RecalledState:
        """The state of a rank; waits until it is on this node.

        Raises:
            RestoreError: no source has the state.
        """
        task = self._tasks.get(rank)
        return await asyncio.shield(task) if task is not None else RecalledState()

    def cancel(self) -> None:
        """Cancel all recalls that are not complete."""
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
        failures = []
        for source in sources:
            try:
                return RecalledState(await self._recall_from(rank, version, source))
            except (CorruptShard, NoMemoryLeft, FetchFailed) as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no answer within {OFFER_TIMEOUT_S:.0f} s"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            log.error("rank %d's state at %s can't be had from %s: %s", rank, version, source.node, reason)
            failures.append(f"{source.node}: {reason}")
        if PurePath(plan.durable_path).name == folder_name(version, self._gang_id):
            return RecalledState(durable_path=plan.durable_path)
        reasons = "; ".join(failures) or "no source holds it"
        raise RestoreError(f"rank {rank}'s state at {version} can't be had: {reasons}")

    async def _recall_from(self, rank: int, version: Version, source: RestoreSource) -> Shard:
        if source.node == self._node:
            return await self._recall_from_this_node(rank, version, source)
        if source.node not in self._peer_addresses:
            raise CorruptShard(f"the order names no address for {source.node}")
        return await self._fetch(rank, version, source)

    async def _recall_from_this_node(self, rank: int, version: Version, source: RestoreSource) -> Shard:
        shard = self._shard_store.find(rank, version)
        if shard is None:
            raise CorruptShard("its memory holds no such shard")
        with shard.held():
            if source.digest and shard.digest.hex() != source.digest:
                raise CorruptShard(f"the shard's digest is {shard.digest.hex()}, the order says {source.digest}")
            found = await self._run_in_thread.in_parts(shard.corrupt_pieces, len(shard.pieces), PART_PIECES)
            corrupt = [n for part in found for n in part]
            if not corrupt:
                return shard if shard.tier == TIER_OWN else await self._copy_replica_into_slot(shard)
        reason = f"{len(corrupt)} of {len(shard.pieces)} pieces don't match their digest"
        self._shard_store.quarantine(shard, reason)
        if self._shard_store.find(rank, version) is not None:
            return await self._recall_from_this_node(rank, version, source)
        raise CorruptShard(reason)

    async def _copy_replica_into_slot(self, replica: Shard) -> Shard:
        """Copy a replica into a slot of this node, because its rank runs here now."""

        memory = await self._run_in_thread(self._slots.allocate, replica.rank, replica.bytes)

        def copy(numbers: range) -> None:
            for piece, data in ((replica.pieces[n], replica.piece(n)) for n in numbers):
                memory.view[piece.offset : piece.offset + piece.length] = data

        try:
            await self._run_in_thread.in_parts(copy, len(replica.pieces), PART_PIECES)
            return await self.add_slot_shard(replica.rank, replica.version, replica.pieces, replica.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def _fetch(self, rank: int, version: Version, source: RestoreSource) -> Shard:
        request = peer_pb2.FetchRequest(gang_id=self._gang_id, node=self._node, rank=rank, version=version.to_wire())
        address = self._peer_addresses[source.node]
        call = self._dial(source.node, address).Fetch(request)
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                offer = await anext(aiter(call), None)
            if offer is None:
                raise CorruptShard("the answer holds no offer")
            return await self._fetch_offered(rank, version, source, offer, host_of(address))
        finally:
            call.cancel()  # the holder need not keep the shard any longer

    async def _fetch_offered(
        self, rank: int, version: Version, source: RestoreSource, offer: peer_pb2.ShardOffer, host: str
    ) -> Shard:
        pieces = shard_offers.pieces_of_offer(offer)
        offered_version = shard_offers.version_of_offer(offer)
        if (offer.rank, offered_version) != (rank, version):
            raise CorruptShard(f"the answer is rank {offer.rank} of {offered_version}")
        if source.digest and offer.digest.hex() != source.digest:
            raise CorruptShard(f"the shard's digest is {offer.digest.hex()}, the order says {source.digest}")
        memory = await self._run_in_thread(self._slots.allocate, rank, offer.bytes)
        try:
            holder = shard_offers.holder_of_offer(offer, host)
            await self._transport.fetch([holder], pieces, range(len(pieces)), memory)
        except BaseException:
            memory.close()
            raise
        return self._store(rank, version, pieces, offer.digest, memory)

    async def add_slot_shard(
        self, rank: int, version: Version, pieces: tuple[Piece, ...], digest: bytes, memory: SealedMemory
    ) -> Shard:
        """Verify every byte of `memory`, then make it a full slot of the rank and store its shard.

        Raises:
            CorruptShard: some bytes do not match their digest.
        """
        verify = partial(verify_pieces, memory, pieces)
        await self._run_in_thread.in_parts(verify, len(pieces), PART_PIECES)
        return self._store(rank, version, pieces, digest, memory)

    def _store(
        self, rank: int, version: Version, pieces: tuple[Piece, ...], digest: bytes, memory: SealedMemory
    ) -> Shard:
        slot = self._slots.adopt(rank, memory)
        shard = Shard(rank, version, TIER_OWN, pieces, digest, memory, lambda: self._slots.mark_free(slot))
        self._shard_store.add(shard)
        return shard
