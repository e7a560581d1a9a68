"""What this node keeps of other nodes' shards, whatever the scheme of redundancy: whole copies, and parts that combine
shards. This is the only module of `checkpoint.store` that knows both."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from muster.checkpoint.format.versions import Version
from muster.checkpoint.redundancy.scheme import NodePlaces
from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.memory.shards import ShardStore
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.store.parity.exclusive_or import NoNumpy
from muster.checkpoint.store.parity.parity_receiver import ParityReceiver
from muster.checkpoint.store.parity.parity_restore import ParityRestore
from muster.checkpoint.store.parity.parity_store import ParityStore
from muster.checkpoint.store.parity.rebuilt_for_flush import RebuiltForFlush
from muster.checkpoint.store.replication.dial import Dial
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.replication.replica_receiver import ReplicaReceiver
from muster.checkpoint.store.restore.shard_holders import ShardHolders
from muster.checkpoint.store.streams.transport import PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import ParityStatus
from muster.v1.peer_pb2 import FetchRequest, ShardOffer, ShardStored


class KeptForOthers:
    """Takes in the shards of other nodes, gives what it keeps to who asks, and rebuilds lost shards.

    Args:
        gang_id, node, dial, transport: as for the checkpoint service.
        shard_store: the shards of this node. What it drops of a version is dropped here, too.
        commit: says which versions are still wanted, and where the agents are.
        holders: asks other nodes for shards.
        run_in_thread: runs a function in a thread.
        on_change: called when `combined` has something new.
        awaits_slot, slot_wait_s: as for `ReplicaReceiver`.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        dial: Dial,
        transport: PieceTransport,
        shard_store: ShardStore,
        commit: CommitProtocol,
        holders: ShardHolders,
        run_in_thread: WorkerThreads,
        on_change: Callable[[], None],
        awaits_slot: Callable[[Version], bool],
        slot_wait_s: float,
    ) -> None:
        self._copies = ReplicaBuilder(gang_id, shard_store, run_in_thread)
        self._copy_receiver = ReplicaReceiver(
            gang_id,
            node,
            shard_store,
            self._copies,
            transport,
            commit.address_of,
            commit.stale_reason,
            awaits_slot,
            slot_wait_s,
        )
        self._parts = ParityStore(gang_id, on_change)
        shard_store.on_versions_dropped = self._parts.drop
        self._part_receiver = ParityReceiver(
            gang_id, node, self._parts, transport, commit.address_of, commit.stale_reason, run_in_thread
        )
        restore = ParityRestore(gang_id, node, dial, commit.address_of, holders, transport, run_in_thread)
        self.rebuild = restore.rebuild
        """Brings a shard that no node holds."""
        self.rebuild_for_flush = RebuiltForFlush(self.rebuild, run_in_thread)
        self.notify_slots_changed = self._copy_receiver.notify_slots_changed
        """Called when a slot of this node was digested, or will not be."""

    def begin_generation(self, places: NodePlaces) -> None:
        """Other shards are this node's to keep."""
        self._parts.set_held(places.parts)
        self._copies.set_replicated_ranks(places.copied_ranks)

    def combined(self) -> list[ParityStatus]:
        """All whole parts that combine shards in this node's memory."""
        return self._parts.statuses()

    async def offer(self, request: ShardOffer) -> ShardStored:
        """Take in a shard of another node."""
        receiver = self._part_receiver if request.HasField("parity") else self._copy_receiver
        return await receiver.offer(request)

    async def fetch(
        self, request: FetchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncGenerator[ShardOffer, None]:
        """Offer a shard, or a part, to a node that asks for it."""
        receiver = self._part_receiver if request.parity_ranks else self._copy_receiver
        async with aclosing(receiver.fetch(request, context)) as answers:
            async for offer in answers:
                yield offer

    def close(self) -> None:
        """Free all memory."""
        self._copies.close()
        self._parts.close()
        self._part_receiver.close()


def why_unable(places: NodePlaces) -> str:
    """Why this node can't do what its places ask for; empty: it can."""
    try:
        if any(place.ranks for of_rank in places.shards_sent.values() for place in of_rank):
            exclusive_or.load()
    except NoNumpy as error:
        return str(error)
    return ""
