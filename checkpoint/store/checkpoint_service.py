"""The checkpoint service of an agent: the shards of its own ranks, and what it keeps of other nodes'.

The service owns the slots that ranks write. It replicates every filled slot, commits versions together with the other
agents, gives the ranks of a new generation their state, and flushes versions to durable storage. It needs no torch.

Invariants:

- Versions are ordered by (generation, step), and a commit drops all older versions. The first commit of a generation
  therefore drops later steps of the generation before.
- Nothing of a fenced generation is replicated or committed. The version that the running generation started from is the
  exception: until the running generation commits a version, this version is brought to its present places.
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from math import inf
from socket import socket
from typing import Any

import grpc

from muster.checkpoint.durable.object_store import UPLOAD_BYTES
from muster.checkpoint.store import handed_over
from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.flush.flush_part import WRITERS
from muster.checkpoint.store.flush.flusher import Flusher, open_durable
from muster.checkpoint.store.flush.retention import Retention
from muster.checkpoint.store.generation_tasks import NEVER_FENCED, GenerationTasks
from muster.checkpoint.store.interval_advice import IntervalAdvice
from muster.checkpoint.store.kept_for_others import KeptForOthers
from muster.checkpoint.store.memory.memory_need import check_room_for_flush
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.rank_reports import RankReports
from muster.checkpoint.store.rank_restores import RankRestores
from muster.checkpoint.store.rank_samples import RankSamples
from muster.checkpoint.store.rank_slots import RankSlots
from muster.checkpoint.store.rank_snapshots import RankSnapshots
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.checkpoint.store.replication.dial import Dial
from muster.checkpoint.store.replication.replica_receiver import LOCAL_SLOT_WAIT_S
from muster.checkpoint.store.restore.folder_loads import FolderLoads
from muster.checkpoint.store.restore.recall import Recall
from muster.checkpoint.store.restore.shard_holders import ShardHolders
from muster.checkpoint.store.restore.shard_reads import ShardReads
from muster.checkpoint.store.streams.transport import PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import agent_pb2 as pb
from muster.v1 import common_pb2, peer_pb2, rank_pb2

FLUSH_THREADS = 3
"""One writes; one copies what is still to be written, so that ranks get their slots; one may still hang in the file
system on behalf of a flush that was given up."""


class CheckpointService:
    """One per agent. All methods run on the agent's event loop.

    Args:
        gang_id, node: the gang and the node of this agent.
        dial: returns a stub for the agent on a node.
        transport: how pieces travel between agents. `close` closes it.
        on_change: called when `shards`, `combined`, `committed`, `progress` or `rank_reports` have something new.
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
        self._transport = transport
        self._on_change = on_change
        # Nobody trains while a state is recalled, so as many threads verify it as the memory of a socket can serve.
        self._run_in_thread = run_in_thread = WorkerThreads(max(4, len(os.sched_getaffinity(0)) // 2))
        self._tasks = tasks = GenerationTasks(node)
        self._shard_store = store = ShardStore(on_change)
        self._sockets = sockets = RankSockets(self._on_rank_message, self._on_rank_page)
        self.rank_reports = RankReports(on_change, lambda rank: sockets.generation(rank) is not None)
        self.rank_samples = RankSamples(self.rank_reports.note_not_finite)
        self._commit = commit = CommitProtocol(
            gang_id,
            node,
            store,
            dial,
            transport,
            tasks.spawn,
            self._on_decision,
            lambda: self._snapshots.passed_step(),
            lambda size, ranks: self._slots.reserve(size, ranks),
        )
        upload_bytes = WRITERS * UPLOAD_BYTES if uploads else 0
        self._slots = RankSlots(
            gang_id, sockets, commit, tasks.spawn_unfenced, run_in_thread, on_change, slots_refused, upload_bytes
        )
        self._snapshots = RankSnapshots(sockets, self._slots, commit, store, tasks, run_in_thread, on_change)
        self._advice = IntervalAdvice(sockets, commit)
        holders = ShardHolders(gang_id, node, dial, commit.address_of)
        self._kept = KeptForOthers(
            gang_id,
            node,
            dial,
            transport,
            store,
            commit,
            holders,
            run_in_thread,
            on_change,
            self._snapshots.awaits_slot,
            slot_wait_s,
        )
        self._snapshots.on_slots_changed = self._kept.notify_slots_changed
        self._recall = Recall(
            node, store, self._slots.pool, holders, transport, run_in_thread, on_change, self._kept.rebuild
        )
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
            self._kept.rebuild_for_flush,
        )
        self._shard_reads = ShardReads(gang_id, node, store, holders, transport, run_in_thread)
        self._rank_restores = RankRestores(sockets, self._recall, self._shard_reads, on_change)
        self._folder_loads = FolderLoads()

    # Called by the agent.

    def rank_socket(self, rank: int, generation: int) -> socket:
        """A new connection for a rank. The caller passes the returned end to the process and closes it."""
        return self._sockets.open(rank, generation)

    def apply_order(self, order: pb.Order) -> None:
        """Take members, ranks and restore plan from an order, before the ranks of its generation start.

        Applying the same order again changes nothing.
        """
        if self._commit.apply_order(order):
            for part in (self._snapshots, self._advice, self.rank_reports, self.rank_samples, self._slots):
                part.begin_generation()
            self._kept.begin_generation(self._commit.places)
            local_ranks = self._commit.local_ranks
            self._folder_loads = FolderLoads(order.generation, len(local_ranks))
            self._shard_reads.begin(order, local_ranks)
            self._recall.start(order, sorted(local_ranks) if not self._shard_reads.written_ranks else ())

    def fence(self, generation: int) -> None:
        """Stop to serve the ranks up to `generation`: read their last messages, then replicate and commit nothing more.

        Slots that were filled before the fence count. Shards are kept.
        """
        self._sockets.close_up_to(generation)
        if generation <= self._commit.fenced_generation:
            return
        self._commit.fence(generation)
        if self._commit.order.generation <= generation:
            self._recall.cancel()
        self._tasks.fence(generation)
        if self._commit.order.generation <= generation:
            self._shard_reads.close()
        self._kept.notify_slots_changed()

    def shards(self) -> list[pb.ShardStatus]:
        """All complete, digested shards in this node's memory: in its slots, and replicas."""
        return [shard.status() for shard in self._shard_store.all()]

    def combined(self) -> list[pb.ParityStatus]:
        """All whole parts in this node's memory that combine shards of other nodes."""
        return self._kept.combined()

    def committed(self) -> common_pb2.Version:
        """The newest version that this agent knows to be committed; (0, 0) before the first commit."""
        return self._commit.committed.to_wire()

    def progress(self) -> dict[int, int]:
        """The newest finished step of each rank of this node in this generation."""
        return dict(self._snapshots.progress)

    def disagreement(self) -> pb.ReplicaDisagreement | None:
        """On the commit leader: the first version of this generation on which replicas disagree; None: none."""
        return self._commit.disagreement

    def transfers(self) -> list[pb.ReplicaTransfer]:
        """What copies of shards to other nodes have reached."""
        return self._commit.transfer_rates.newest()

    def corrupt_copies(self) -> list[pb.CorruptCopy]:
        """The newest copies of shards that were found corrupt, and are used no more."""
        return self._shard_store.corrupt_copies.newest()

    def restore_progress(self) -> pb.RestoreProgress | None:
        """How far the restore of this node's ranks is; None: they start without a state."""
        if (loads := self._folder_loads.status()) is not None:
            return loads
        return (self._shard_reads if self._shard_reads.written_ranks else self._recall).progress.status()

    def reserved_bytes(self) -> int:
        """The bytes of memory that this node keeps ready for ranks that may come."""
        return self._slots.pool.reserve.bytes

    def snapshot_cost(self) -> pb.SnapshotCost | None:
        """On the commit leader: what snapshots cost; None: nothing was measured in this generation."""
        return self._advice.costs()

    @property
    def generation(self) -> int:
        """The newest generation that ranks of this node were ordered to run."""
        return self._commit.order.generation

    @property
    def no_slots(self) -> str:
        """Why a rank of the running generation has no slots; empty: each that asked has them, or none gets any."""
        return self._slots.refused

    @property
    def copies_wait(self) -> str:
        """Which node has taken nothing of this one for some seconds, and why; empty: none."""
        return self._commit.refusals.words()

    def flush_progress(self) -> pb.FlushProgress | None:
        """What this node has written of the newest flush; None: no flush was ordered."""
        return self._flusher.progress()

    def is_digesting(self, rank: int, generation: int) -> bool:
        """Whether a rank has filled a slot that is not among `shards` yet, but will be. The rank may have ended."""
        return self._snapshots.is_digesting(rank, generation)

    def stop_ranks(self, reason: str, last_generation: float = inf) -> None:
        """Ask every rank up to `last_generation` to finish the step, keep the state and exit. A flush lets go of their
        slots."""
        if any(self._sockets.generation(rank) is not None for rank in self._commit.local_ranks):
            self._tasks.spawn_unfenced(self._flusher.let_go_before_a_stop())
        self._sockets.stop(reason, last_generation)

    async def flush(
        self, order: pb.FlushOrder, durable_dir: str, keep: int = 0, keep_s: float = 0.0
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
        store = await open_durable(durable_dir, self._run_in_thread)
        version = await self._flusher.flush(order, store, Retention(keep, keep_s))
        return version.to_wire() if version is not None else None

    def slot_shards(self) -> list[Shard]:
        """The shards in this node's slots, of the two newest versions. Between two commits there are no more."""
        return handed_over.slot_shards(self._shard_store)

    async def adopt_shard(self, offer: peer_pb2.ShardOffer, descriptor: int) -> None:
        """Add a shard that this gang's agent left here when the job was requeued. Every byte is verified.

        Args:
            offer: describes the shard, as `shard_offers.make_offer` does.
            descriptor: the shard's memfd. This method owns it.

        Raises:
            OtherLayout: another version of Muster has written the shard.
            CorruptShard: the memfd does not match the description, or the shard belongs to another gang.
        """
        await handed_over.adopt_shard(self._gang_id, self._recall, offer, descriptor)

    async def close(self) -> None:
        """End all tasks and free all memory."""
        self._recall.cancel()
        self.rank_reports.close()
        self._sockets.close_up_to(NEVER_FENCED)
        self.rank_samples.close()
        await self._tasks.close()
        self._shard_reads.close()
        self._transport.close()
        self._kept.close()
        self._shard_store.drop(lambda _: True, "the agent ends")
        self._slots.pool.close()
        self._run_in_thread.close()
        self._flush_threads.close()

    # The part of PeerService that concerns shards.

    async def Offer(
        self, request: peer_pb2.ShardOffer, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardStored:
        """A node offers a shard: one of its places is on this node."""
        return await self._kept.offer(request)

    async def Fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncGenerator[peer_pb2.ShardOffer, None]:
        """A node asks for a whole shard, because the shard's rank starts there, or for what rebuilds one."""
        async with aclosing(self._kept.fetch(request, context)) as answers:
            async for offer in answers:
                yield offer

    async def Stored(
        self, request: peer_pb2.StoredReport, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """A node reports to the commit leader that it has stored or skipped a version."""
        return peer_pb2.PeerAck(refused=self._commit.receive_report(request))

    async def Committed(
        self, request: peer_pb2.CommitNotice, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """The commit leader announces that a version is committed or void."""
        return peer_pb2.PeerAck(refused=self._commit.receive_decision(request))

    # Messages from ranks.

    def _on_rank_message(self, rank: int, generation: int, message: rank_pb2.RankMessage) -> None:
        runs = generation == self._commit.order.generation
        if runs:
            self.rank_reports.handle_message(rank, message)
            if rank == 0:
                self._advice.note(message)
        match message.WhichOneof("body"):
            case "progress":
                self._snapshots.note_progress(rank, generation, message.progress)
                if runs:
                    self.rank_samples.note_progress(rank, message.progress)
            case "filled":
                self._snapshots.note_filled(rank, generation, message.filled)
            case "join":
                self._tasks.spawn(generation, self._rank_restores.join(rank, generation, message.join.release))
            case "layout":
                self._tasks.spawn(generation, self._slots.answer(rank, generation, message.layout))
            case "read" if runs and message.read.done:
                self._shard_reads.done(rank)
                self._on_change()
            case "read" if runs:
                self._tasks.spawn(generation, self._rank_restores.read(rank, generation, message.read))
            case "load" if runs:
                self._folder_loads.note(rank, message.load)
                self._slots.expect(rank, message.load.bytes)
                self._on_change()

    def _on_rank_page(self, rank: int, generation: int, page: int) -> None:
        if generation == self._commit.order.generation:
            self.rank_samples.add_page(rank, page)
        else:
            os.close(page)

    def _on_decision(self) -> None:
        for rank in self._commit.local_ranks:
            self._slots.grant_free(rank)
        self._advice.advise()
        self._kept.notify_slots_changed()
        self._on_change()
