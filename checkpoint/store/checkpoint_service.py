"""The checkpoint service of an agent: the shards of its own ranks, and the replicas that it keeps for other nodes.

The service owns the slots that ranks write. It replicates every filled slot, commits versions together with the other
agents, gives the ranks of a new generation their state, and flushes versions to durable storage. It needs no torch.

Invariants:

- A slot counts as full when the rank reports it as filled (`RankFilled`). It is written again only after a newer
  version was committed by the whole gang, or after its own version was decided to be void.
- Versions are ordered by (generation, step), and a commit drops all older versions. The first commit of a generation
  therefore drops later steps of the generation before.
- Nothing of a fenced generation is replicated or committed. The version that the running generation started from is the
  exception: until the running generation commits a version, this version is replicated to the present buddies.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from math import inf
from socket import socket
from typing import Any

import grpc

from muster.checkpoint.durable.locations import is_url, open_store
from muster.checkpoint.durable.object_store import UPLOAD_BYTES
from muster.checkpoint.format.errors import CheckpointError, CorruptShard, FlushError
from muster.checkpoint.format.layout import read_footer
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.flush.flush_part import WRITERS
from muster.checkpoint.store.flush.flusher import Flusher
from muster.checkpoint.store.flush.retention import Retention
from muster.checkpoint.store.memory.memory_need import check_room_for_flush
from muster.checkpoint.store.memory.pieces import digest_pieces, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import Slot
from muster.checkpoint.store.parity.parity_receiver import ParityReceiver
from muster.checkpoint.store.parity.parity_restore import ParityRestore
from muster.checkpoint.store.parity.parity_store import ParityStore
from muster.checkpoint.store.parity.rebuilt_for_flush import RebuiltForFlush
from muster.checkpoint.store.rank_reports import RankReports
from muster.checkpoint.store.rank_restores import RankRestores
from muster.checkpoint.store.rank_slots import RankSlots
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import Dial
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.replication.replica_receiver import LOCAL_SLOT_WAIT_S, ReplicaReceiver
from muster.checkpoint.store.restore.folder_loads import FolderLoads
from muster.checkpoint.store.restore.recall import Recall
from muster.checkpoint.store.restore.shard_holders import ShardHolders
from muster.checkpoint.store.restore.shard_reads import ShardReads
from muster.checkpoint.store.streams.transport import PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import common_pb2, peer_pb2, rank_pb2
from muster.v1.agent_pb2 import (
    TIER_OWN,
    CorruptCopy,
    FlushOrder,
    FlushProgress,
    Order,
    ParityStatus,
    ReplicaDisagreement,
    ReplicaTransfer,
    RestoreProgress,
    ShardStatus,
    SnapshotCost,
)

log = logging.getLogger(__name__)

FLUSH_THREADS = 3
"""One writes; one copies what is still to be written, so that ranks get their slots; one may still hang in the file
system on behalf of a flush that was given up."""

_NEVER_FENCED = 1 << 62
"""A generation above all others, for tasks that a fence must not cancel."""


class CheckpointService:
    """One per agent. All methods run on the agent's event loop.

    Args:
        gang_id, node: the gang and the node of this agent.
        dial: returns a stub for the agent on a node.
        transport: how pieces travel between agents. `close` closes it.
        on_change: called when `shards`, `parities`, `committed`, `progress` or `rank_reports` have something new.
        slots_refused: why no rank gets slots; empty if ranks get slots.
        slot_wait_s: seconds that an offer waits for slots of this node.
        uploads: durable checkpoints go to a store of objects, so that uploads take memory of this process.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        dial: Dial,
        transport: PieceTransport,
        on_change: Callable[[], None],
        slots_refused: str = "",
        slot_wait_s: float = LOCAL_SLOT_WAIT_S,
        *,
        uploads: bool = False,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._transport = transport
        self._on_change = on_change
        # Nobody trains while a state is recalled, so as many threads verify it as the memory of a socket can serve.
        self._run_in_thread = run_in_thread = WorkerThreads(max(4, len(os.sched_getaffinity(0)) // 2))
        self._shard_store = store = ShardStore(on_change)
        self._sockets = RankSockets(self._on_rank_message)
        self.rank_reports = RankReports(on_change, lambda rank: self._sockets.generation(rank) is not None)
        self._replica_builder = ReplicaBuilder(gang_id, store, run_in_thread)
        self._commit_protocol = commit = CommitProtocol(
            gang_id,
            node,
            store,
            dial,
            transport,
            self._spawn,
            self._on_decision,
            self._passed_step,
            lambda size, ranks: self._slots.reserve(size, ranks),
        )
        upload_bytes = WRITERS * UPLOAD_BYTES if uploads else 0
        self._slots = RankSlots(
            gang_id,
            self._sockets,
            commit,
            lambda work: self._spawn(_NEVER_FENCED, work),
            run_in_thread,
            on_change,
            slots_refused,
            upload_bytes,
        )
        self._replica_receiver = ReplicaReceiver(
            gang_id,
            node,
            store,
            self._replica_builder,
            transport,
            commit.address_of,
            commit.stale_reason,
            self._awaits_slot,
            slot_wait_s,
        )
        holders = ShardHolders(gang_id, node, dial, commit.address_of)
        self._parity_store = ParityStore(gang_id, on_change)
        store.on_versions_dropped = self._parity_store.drop
        self._parity_receiver = ParityReceiver(
            gang_id, node, self._parity_store, transport, commit.address_of, commit.stale_reason, run_in_thread
        )
        parity_restore = ParityRestore(gang_id, node, dial, commit.address_of, holders, transport, run_in_thread)
        rebuild = parity_restore.rebuild
        self._recall = Recall(node, store, self._slots.pool, holders, transport, run_in_thread, on_change, rebuild)
        # Threads of its own: those that hang in a dead file system must not keep snapshots from being digested.
        self._flush_threads = WorkerThreads(FLUSH_THREADS)
        self._flusher = Flusher(
            gang_id,
            node,
            store,
            lambda: commit.committed,
            self._flush_threads,
            on_change,
            lambda size: check_room_for_flush(size, self._slots.copies, upload_bytes),
            RebuiltForFlush(rebuild, run_in_thread),
        )
        self._shard_reads = ShardReads(gang_id, node, store, holders, transport, run_in_thread)
        self._rank_restores = RankRestores(self._sockets, self._recall, self._shard_reads, on_change)
        self._folder_loads = FolderLoads()
        self._tasks: dict[asyncio.Task[None], int] = {}
        """Each running task and the generation on whose behalf it runs."""
        self._progress: dict[int, int] = {}
        self._undecided_ranks: set[int] = set()
        """Ranks that have neither kept nor skipped their newest step yet."""
        self._digesting: set[tuple[int, Version]] = set()
        self._advised = rank_pb2.AgentInterval()
        """What rank 0 of this generation was told last."""

    # Called by the agent.

    def rank_socket(self, rank: int, generation: int) -> socket:
        """A new connection for a rank. The caller passes the returned end to the process and closes it."""
        return self._sockets.open(rank, generation)

    def apply_order(self, order: Order) -> None:
        """Take members, ranks and restore plan from an order, before the ranks of its generation start.

        Applying the same order again changes nothing.
        """
        if self._commit_protocol.apply_order(order):
            self._progress, self._undecided_ranks = {}, set()
            self._advised = rank_pb2.AgentInterval()
            self.rank_reports.begin_generation()
            replicated_nodes = {m.node for m in order.members if self._node in (m.buddy, *m.more_buddies)}
            self._parity_store.set_held(self._commit_protocol.parity_places.held)
            copied_ranks = [place.rank for place in order.places if place.node in replicated_nodes]
            self._replica_builder.set_replicated_ranks(copied_ranks)
            self._slots.begin_generation(copied_ranks)
            local_ranks = self._commit_protocol.local_ranks
            self._folder_loads = FolderLoads(order.generation, len(local_ranks))
            self._shard_reads.begin(order, local_ranks)
            self._recall.start(order, sorted(local_ranks) if not self._shard_reads.written_ranks else ())

    def fence(self, generation: int) -> None:
        """Stop to serve the ranks up to `generation`: read their last messages, then replicate and commit nothing more.

        Slots that were filled before the fence count. Shards are kept.
        """
        self._sockets.close_up_to(generation)
        if generation <= self._commit_protocol.fenced_generation:
            return
        self._commit_protocol.fence(generation)
        if self._commit_protocol.order.generation <= generation:
            self._recall.cancel()
        for task, task_generation in self._tasks.items():
            if task_generation <= generation:
                task.cancel()
        if self._commit_protocol.order.generation <= generation:
            self._shard_reads.close()
        self._replica_receiver.notify_slots_changed()

    def shards(self) -> list[ShardStatus]:
        """All complete, digested shards in this node's memory: in its slots, and replicas."""
        return [shard.status() for shard in self._shard_store.all()]

    def parities(self) -> list[ParityStatus]:
        """All whole parts of parities in this node's memory."""
        return self._parity_store.statuses()

    def committed(self) -> common_pb2.Version:
        """The newest version that this agent knows to be committed; (0, 0) before the first commit."""
        return self._commit_protocol.committed.to_wire()

    def progress(self) -> dict[int, int]:
        """The newest finished step of each rank of this node in this generation."""
        return dict(self._progress)

    def disagreement(self) -> ReplicaDisagreement | None:
        """On the commit leader: the first version of this generation on which replicas disagree; None: none."""
        return self._commit_protocol.disagreement

    def transfers(self) -> list[ReplicaTransfer]:
        """What copies of shards to other nodes have reached."""
        return self._commit_protocol.transfer_rates.newest()

    def corrupt_copies(self) -> list[CorruptCopy]:
        """The newest copies of shards that were found corrupt, and are used no more."""
        return self._shard_store.corrupt_copies.newest()

    def restore_progress(self) -> RestoreProgress | None:
        """How far the restore of this node's ranks is; None: they start without a state."""
        if (loads := self._folder_loads.status()) is not None:
            return loads
        return (self._shard_reads if self._shard_reads.written_ranks else self._recall).progress.status()

    def reserved_bytes(self) -> int:
        """The bytes of memory that this node keeps ready for ranks that may come."""
        return self._slots.pool.reserve.bytes

    def snapshot_cost(self) -> SnapshotCost | None:
        """On the commit leader: what snapshots cost; None: nothing was measured in this generation."""
        costs = self._commit_protocol.costs
        if not costs.every:
            return None
        return SnapshotCost(
            every=costs.every,
            auto_interval=costs.auto,
            stall_us=round(costs.stall_s * 1e6),
            step_us=round(costs.step_s * 1e6),
            slots_us=round(costs.slots_s * 1e6),
            delay_us=round(costs.delay_s * 1e6),
        )

    @property
    def no_slots(self) -> str:
        """Why a rank of the running generation has no slots; empty: each that asked has them, or none gets any."""
        return self._slots.refused

    def flush_progress(self) -> FlushProgress | None:
        """What this node has written of the newest flush; None: no flush was ordered."""
        return self._flusher.progress()

    def is_digesting(self, rank: int, generation: int) -> bool:
        """Whether a rank has filled a slot that is not among `shards` yet, but will be. The rank may have ended."""
        self._sockets.read_pending(rank, generation)
        return any(of == rank and version.generation == generation for of, version in self._digesting)

    def stop_ranks(self, reason: str, last_generation: float = inf) -> None:
        """Ask every rank up to `last_generation` to finish the step, keep the state and exit. A flush lets go of their
        slots."""
        if any(self._sockets.generation(rank) is not None for rank in self._commit_protocol.local_ranks):
            self._spawn(_NEVER_FENCED, self._flusher.let_go_before_a_stop())
        self._sockets.stop(reason, last_generation)

    async def flush(
        self, order: FlushOrder, durable_dir: str, keep: int = 0, keep_s: float = 0.0
    ) -> common_pb2.Version | None:
        """Write this node's part of a version to `durable_dir`. On the flush leader this returns when all is complete.

        The flush writes the version that the order names, or a newer one if the gang has committed one since. A newer
        order ends the flush of an older order, so every agent needs every order, whether it writes a part or not.

        Returns:
            On the flush leader the version that was written; None on the others.

        `keep`, `keep_s`: which older checkpoints of this gang stay (`retention.Retention`).

        Raises:
            FlushError: the flush failed or was superseded. No incomplete files are left.
        """
        try:
            # Loading the packages for a store of objects takes a second.
            store = (
                await self._run_in_thread(open_store, durable_dir) if is_url(durable_dir) else open_store(durable_dir)
            )
        except CheckpointError as error:
            raise FlushError(f"durable_dir = {error}") from error
        version = await self._flusher.flush(order, store, Retention(keep, keep_s))
        return version.to_wire() if version is not None else None

    def slot_shards(self) -> list[Shard]:
        """The shards in this node's slots, of the two newest versions. Between two commits there are no more."""
        in_slots = [shard for shard in self._shard_store.all() if shard.tier == TIER_OWN]
        newest = sorted({shard.version for shard in in_slots})[-2:]
        return [shard for shard in in_slots if shard.version in newest]

    async def adopt_shard(self, offer: peer_pb2.ShardOffer, descriptor: int) -> None:
        """Add a shard that this gang's agent left here when the job was requeued. Every byte is verified.

        Args:
            offer: describes the shard, as `shard_offers.make_offer` does.
            descriptor: the shard's memfd. This method owns it.

        Raises:
            OtherLayout: another version of Muster has written the shard.
            CorruptShard: the memfd does not match the description, or the shard belongs to another gang.
        """
        memory = SealedMemory.adopt(descriptor)
        try:
            pieces = shard_offers.pieces_of_offer(offer)
            if offer.gang_id != self._gang_id or memory.size != offer.bytes:
                raise CorruptShard(f"{memory.size} bytes are described as {offer.bytes} of gang {offer.gang_id}")
            read_footer(memory.view)
            version = shard_offers.version_of_offer(offer)
            await self._recall.add_slot_shard(offer.rank, version, pieces, offer.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def close(self) -> None:
        """End all tasks and free all memory."""
        self._recall.cancel()
        self.rank_reports.close()
        self._sockets.close_up_to(_NEVER_FENCED)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._shard_reads.close()
        self._transport.close()
        self._replica_builder.close()
        self._shard_store.drop(lambda _: True, "the agent ends")
        self._parity_store.close()
        self._parity_receiver.close()
        self._slots.pool.close()
        self._run_in_thread.close()
        self._flush_threads.close()

    # The part of PeerService that concerns shards. grpc.aio calls these methods.

    async def Offer(
        self, request: peer_pb2.ShardOffer, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardStored:
        """A node offers a shard: this node is its buddy, or holds a part of its parity."""
        if request.HasField("parity"):
            return await self._parity_receiver.offer(request)
        return await self._replica_receiver.offer(request)

    async def Fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncGenerator[peer_pb2.ShardOffer, None]:
        """A node asks for a whole shard, because the shard's rank starts there, or for what rebuilds one."""
        receiver = self._parity_receiver if request.parity_ranks else self._replica_receiver
        async with aclosing(receiver.fetch(request, context)) as answers:
            async for offer in answers:
                yield offer

    async def Stored(
        self, request: peer_pb2.StoredReport, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """A node reports to the commit leader that it has stored or skipped a version."""
        return peer_pb2.PeerAck(refused=self._commit_protocol.receive_report(request))

    async def Committed(
        self, request: peer_pb2.CommitNotice, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """The commit leader announces that a version is committed or void."""
        return peer_pb2.PeerAck(refused=self._commit_protocol.receive_decision(request))

    # Messages from ranks.

    def _on_rank_message(self, rank: int, generation: int, message: rank_pb2.RankMessage) -> None:
        if generation == self._commit_protocol.order.generation:
            self.rank_reports.handle_message(rank, message)
            if rank == 0:
                self._note_costs(message)
        match message.WhichOneof("body"):
            case "progress":
                version = Version(generation, message.progress.step)
                self._on_progress(rank, version, message.progress.snapshot_skipped)
            case "filled":
                self._on_filled(rank, Version(generation, message.filled.step), message.filled)
            case "join":
                self._spawn(generation, self._rank_restores.join(rank, generation, message.join.release))
            case "layout":
                self._spawn(generation, self._on_layout(rank, generation, message.layout))
            case "read" if generation == self._commit_protocol.order.generation:
                self._on_read(rank, generation, message.read)
            case "load" if generation == self._commit_protocol.order.generation:
                self._folder_loads.note(rank, message.load)
                self._on_change()

    def _note_costs(self, message: rank_pb2.RankMessage) -> None:
        """Take what a message of rank 0 says of the pace of the training and of its snapshots."""
        costs = self._commit_protocol.costs
        match message.WhichOneof("body"):
            case "progress":
                costs.note_step(message.progress.step, asyncio.get_running_loop().time())
            case "declared":
                costs.note_pause()
            case "filled":
                filled = message.filled
                costs.note_snapshot(filled.stall_us / 1e6, filled.every, auto=filled.auto_interval)
                costs.slots_s = filled.slots_us / 1e6 or costs.slots_s

    def _on_read(self, rank: int, generation: int, read: rank_pb2.RankRead) -> None:
        if read.done:
            self._shard_reads.done(rank)
            self._on_change()
        else:
            self._spawn(generation, self._rank_restores.read(rank, generation, read))

    async def _on_layout(self, rank: int, generation: int, layout: rank_pb2.RankLayout) -> None:
        """Give a rank its slots. The rank has its state, so shards that no restore plan needs are dropped before."""
        restored = Version.from_wire(self._commit_protocol.order.restore.version)
        self._shard_store.drop_versions(
            lambda version: version.generation < generation and version != restored, "a newer generation runs"
        )
        self._commit_protocol.record_new_slots(rank)
        answer, slots = await self._slots.give(rank, layout.slot_bytes, layout.shared_bytes)
        message = rank_pb2.AgentRankMessage(slots=answer)
        self._sockets.send_in(generation, rank, message, *(slot.memory.fd for slot in slots))
        if slots:
            self._slots.grant_free(rank, for_any_step=True)

    def _on_progress(self, rank: int, version: Version, skipped: bool) -> None:
        if version.generation != self._commit_protocol.order.generation:
            return
        if version.step >= self._progress.get(rank, 0):
            self._progress[rank] = version.step
            (self._undecided_ranks.discard if skipped else self._undecided_ranks.add)(rank)
        if self._progress.keys() >= self._commit_protocol.local_ranks:
            self._commit_protocol.all_ranks_stepped()
        if skipped and not self._slots.never:
            self._commit_protocol.record_skipped(rank, version)
            self._replica_receiver.notify_slots_changed()
        self._on_change()

    def _on_filled(self, rank: int, version: Version, filled: rank_pb2.RankFilled) -> None:
        slot = self._slots.pool.mark_full(rank, filled.slot)
        if slot is None:
            log.error("rank %d reports slot %d as filled, and may not write this slot: ignored", rank, filled.slot)
            return
        if self._commit_protocol.is_not_needed(version):
            self._slots.pool.mark_free(slot)
            return
        self._undecided_ranks.discard(rank)
        self._commit_protocol.record_filled(rank, version, filled.stall_us / 1e6)
        # A fence must not cancel this task: what was filled before the fence counts.
        self._digesting.add((rank, version))
        self._spawn(_NEVER_FENCED, self._digest_and_replicate(rank, version, slot))

    async def _digest_and_replicate(self, rank: int, version: Version, slot: Slot) -> None:
        try:
            pieces = await self._run_in_thread(digest_pieces, slot.memory.view)
        except CorruptShard as error:
            log.error("rank %d's snapshot of %s can't be used: %s", rank, version, error)
            self._commit_protocol.skip(version)
            self._slots.pool.mark_free(slot)
            self._on_change()
            return
        finally:
            self._digesting.discard((rank, version))
        digest = shard_digest(pieces)
        shard = Shard(rank, version, TIER_OWN, pieces, digest, slot.memory, lambda: self._slots.pool.mark_free(slot))
        if self._commit_protocol.is_not_needed(version):
            shard.release()
            self._on_change()
            return
        self._shard_store.add(shard)
        self._replica_receiver.notify_slots_changed()
        self._commit_protocol.start_replication(shard)

    # What the parts of this service ask each other.

    def _passed_step(self) -> int:
        """The newest step that some rank can no longer keep.

        A rank whose newest step is undecided may still wait for a slot, so that it has passed only the step before.
        """
        return max((step - (rank in self._undecided_ranks) for rank, step in self._progress.items()), default=0)

    def _on_decision(self) -> None:
        for rank in self._commit_protocol.local_ranks:
            self._slots.grant_free(rank)
        self._advise_interval()
        self._replica_receiver.notify_slots_changed()
        self._on_change()

    def _advise_interval(self) -> None:
        """Tell rank 0 of this node the best interval of snapshots, if it leaves the interval to Muster."""
        costs = self._commit_protocol.costs
        advice = rank_pb2.AgentInterval(every=costs.choose(), period=costs.period())
        if costs.auto and advice != self._advised:
            self._advised = advice
            message = rank_pb2.AgentRankMessage(interval=advice)
            self._sockets.send_in(self._commit_protocol.order.generation, 0, message)

    def _awaits_slot(self, version: Version) -> bool:
        """Whether a rank of this node may still fill a slot with this version."""
        commit = self._commit_protocol
        if version.generation != commit.order.generation or commit.stale_reason(version) or commit.skipped >= version:
            return False
        return any(
            self._sockets.generation(rank) == version.generation and self._shard_store.slot_shard(rank, version) is None
            for rank in commit.local_ranks
        )

    def _spawn(self, generation: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = generation
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the checkpoint service on %s failed", self._node, exc_info=error)
