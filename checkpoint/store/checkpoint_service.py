"""The keeper: an agent's memory of its ranks' states, and of the states that it keeps for other nodes.

It owns the slots that ranks write, sees to it that every filled slot stands twice, agrees with the other agents on
what is committed, hands a new generation's ranks their state, and writes versions to durable storage. No torch.

What holds at all times:
- a slot counts from the rank's RankFilled on; it is written again only when a newer version is committed gang-wide,
  or its own version is void;
- versions order by (generation, step); a commit deletes what is older, so the first commit of a generation deletes
  the later steps of the one before;
- nothing of a fenced generation is replicated or committed any more, but for the version that the running one started
  from: until that has committed one itself, its shards are brought to the present buddies.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import grpc

from muster.checkpoint.format.errors import CorruptShard, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.flush.flusher import Flusher
from muster.checkpoint.store.memory.pieces import digest_pieces, shard_digest
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import SLOTS_PER_RANK, NoMemoryLeft, SealedMemory, Slot, SlotPool
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.checkpoint.store.recall import Recall
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.replication.replica_receiver import ReplicaReceiver
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import common_pb2, peer_pb2, rank_pb2
from muster.v1.agent_pb2 import TIER_OWN, FlushOrder, Order, ShardStatus

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

PHASE_LETTERS = 64
"""So much of a declared phase's name is told."""


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class CheckpointService:
    """One per agent. All methods run on the agent's event loop.

    Args:
        gang_id: whose states these are.
        node: this node's name.
        dial: a stub for a peer's address, host:port.
        changed: called when `shards`, `committed`, `progress` or `phases` has something new to say.
        refused: why no rank gets slots, in words; empty: they do.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        dial: Callable[[str], "PeerServiceAsyncStub"],
        changed: Callable[[], None],
        refused: str = "",
    ) -> None:
        self._gang_id = gang_id
        self._refused = refused
        self._node = node
        self._dial = dial
        self._changed = changed
        self._work = WorkerThreads()
        self._shard_store = ShardStore(changed)
        self._sockets = RankSockets(self._received)
        self._slots = SlotPool(gang_id, self._offer)
        self._replica_builder = ReplicaBuilder(gang_id, self._shard_store, self._work)
        self._commit_protocol = CommitProtocol(
            gang_id, node, self._shard_store, dial, self._spawn, self._settled, self._now
        )
        self._replica_receiver = ReplicaReceiver(
            gang_id, self._shard_store, self._replica_builder, self._commit_protocol.stale, self._awaited
        )
        self._flusher = Flusher(gang_id, node, self._shard_store, lambda: self._commit_protocol.committed, self._work)
        self._recall = Recall(gang_id, node, self._shard_store, self._slots, dial, self._work)
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._progress: dict[int, int] = {}
        self._open: set[int] = set()
        """Whose newest step is neither kept nor skipped yet."""
        self._phases: dict[int, str] = {}
        self._digesting: set[tuple[int, Version]] = set()

    # What the agent asks and tells.

    def rank_socket(self, rank: int, generation: int) -> socket:
        """A new connection for a rank; the caller hands the returned end to the process and closes it."""
        return self._sockets.open(rank, generation)

    def enlist(self, order: Order) -> None:
        """Take note of an order: who is in the gang, who leads, where the ranks' states come from.

        Said before the ranks of a generation start; saying it again changes nothing.
        """
        if self._commit_protocol.enlist(order):
            self._progress, self._phases, self._open = {}, {}, set()
            wards = {m.node for m in order.members if m.buddy == self._node}
            self._replica_builder.expect(p.rank for p in order.places if p.node in wards)
            self._recall.start(order, sorted(self._commit_protocol.local))

    def fence(self, generation: int) -> None:
        """The ranks up to `generation` have ended or are ending: hear them out, replicate and commit nothing of theirs.

        What they had filled before counts. Their shards stay.
        """
        self._sockets.drop(generation)
        if generation <= self._commit_protocol.fenced:
            return
        self._commit_protocol.fence(generation)
        if self._commit_protocol.order.generation <= generation:
            self._recall.cancel()
        for task, of in self._tasks.items():
            if of <= generation:
                task.cancel()
        self._replica_receiver.news()

    def shards(self) -> list[ShardStatus]:
        """All whole, digested shards in this node's memory, own and buddies'."""
        return [shard.status() for shard in self._shard_store.all()]

    def committed(self) -> common_pb2.Version:
        """The newest version that this agent knows to be committed; (0, 0) before the first."""
        return self._commit_protocol.committed.to_wire()

    def progress(self) -> dict[int, int]:
        """The newest step that each rank of this node has declared in this generation."""
        return dict(self._progress)

    def phases(self) -> dict[int, str]:
        """The phase that each rank of this node has declared to be in, if any."""
        return dict(self._phases)

    def behind(self, rank: int, generation: int) -> bool:
        """Whether a rank, which may have ended, has filled a slot that is not among `shards` yet, but will be."""
        self._sockets.hear(rank, generation)
        return any(of == rank and version.generation == generation for of, version in self._digesting)

    def stop_ranks(self, reason: str) -> None:
        """Ask every rank for a planned stop: finish the step, snapshot, leave."""
        self._sockets.stop(reason)

    async def flush(self, order: FlushOrder, durable_dir: str) -> None:
        """Write this node's share of a version to `durable_dir`; the leading node returns when the whole is in place.

        What is written is the version that the order names, or a newer one where the gang has gone on since. A newer
        order ends an older one's flush: it is to be told of them all, wherever its parts are written.

        Raises:
            FlushError: it failed or was superseded. Nothing half-done is left.
        """
        await self._flusher.flush(order, Path(durable_dir))

    def own_shards(self) -> list[Shard]:
        """What stands in this node's own slots, of the two newest versions: there are no more between two commits."""
        own = [shard for shard in self._shard_store.all() if shard.tier == TIER_OWN]
        newest = sorted({shard.version for shard in own})[-2:]
        return [shard for shard in own if shard.version in newest]

    async def take_back(self, offer: peer_pb2.ShardOffer, descriptor: int) -> None:
        """Take in a shard that this gang's agent here had left when the job was requeued; every byte is verified.

        Args:
            offer: describes it, as `transfer.offer_of` does.
            descriptor: its memfd; owned from now on.

        Raises:
            CorruptShard: it isn't what is described, or of another gang.
        """
        memory = SealedMemory.adopt(descriptor)
        try:
            pieces = transfer.pieces_of_offer(offer)
            if offer.gang_id != self._gang_id or memory.size != offer.bytes:
                raise CorruptShard(f"{memory.size} bytes are described as {offer.bytes} of gang {offer.gang_id}")
            await self._recall.take_in(offer.rank, transfer.version_of_offer(offer), pieces, offer.digest, memory)
        except BaseException:
            memory.close()
            raise

    async def close(self) -> None:
        """End all work and free all memory."""
        self._recall.cancel()
        self._sockets.drop(1 << 62)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._replica_builder.close()
        self._shard_store.drop(lambda _: True, "the agent leaves")
        self._slots.close()
        self._work.close()

    # The PeerService's share of this part, as grpc.aio calls it.

    async def Offer(
        self, request: peer_pb2.ShardOffer, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardNeed:
        """A node whose buddy this is offers a shard."""
        return await self._replica_receiver.offer(request)

    async def Put(
        self, request_iterator: AsyncIterable[peer_pb2.ShardData], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardStored:
        """The pieces that were missing."""
        return await self._replica_receiver.put(request_iterator)

    async def Fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[peer_pb2.ShardData]:
        """A node needs a whole shard for a rank that starts there."""
        async for message in self._replica_receiver.fetch(request, self._node, context):
            yield message

    async def Stored(
        self, request: peer_pb2.StoredReport, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """To the leader: a node's ranks stand twice, or never will."""
        return peer_pb2.PeerAck(refused=self._commit_protocol.hear_report(request))

    async def Committed(
        self, request: peer_pb2.CommitNotice, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """From the leader: a version is committed, or void."""
        return peer_pb2.PeerAck(refused=self._commit_protocol.hear_notice(request))

    # What ranks say.

    def _received(self, rank: int, generation: int, message: rank_pb2.RankMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "progress":
            self._progressed(rank, Version(generation, message.progress.step), message.progress.snapshot_skipped)
        elif kind == "declared":
            self._declared(rank, generation, message.declared.phase)
        elif kind == "filled":
            self._filled(rank, Version(generation, message.filled.step), message.filled.slot)
        elif kind == "join":
            self._spawn(generation, self._welcome(rank, generation))
        elif kind == "layout":
            self._spawn(generation, self._deal(rank, generation, message.layout.slot_bytes))

    async def _welcome(self, rank: int, generation: int) -> None:
        try:
            await self._answer(rank, generation)
        except RestoreError as error:
            self._tell(rank, generation, rank_pb2.AgentRankMessage(restore=rank_pb2.AgentRestore(refused=str(error))))
        except BaseException:
            # Without an answer the rank would wait for ever.
            self._sockets.hang_up(rank, generation)
            raise

    async def _answer(self, rank: int, generation: int) -> None:
        recalled = await self._recall.of(rank)
        answer = rank_pb2.AgentRestore(durable_path=recalled.durable_path)
        if recalled.shard is None:
            self._tell(rank, generation, rank_pb2.AgentRankMessage(restore=answer))
            return
        answer.version.CopyFrom(recalled.shard.version.to_wire())
        answer.bytes = recalled.shard.bytes
        with recalled.shard.held(), _closing(recalled.shard.memory.read_only()) as fd:
            self._tell(rank, generation, rank_pb2.AgentRankMessage(restore=answer), fd)

    async def _deal(self, rank: int, generation: int, size: int) -> None:
        """The rank has its state and wants slots: what no plan needs any more makes room for them."""
        keep = Version.from_wire(self._commit_protocol.order.restore.version)
        self._shard_store.drop(
            lambda s: s.version.generation < generation and s.version != keep, "a newer generation runs"
        )
        fresh = []
        try:
            if self._refused:
                raise NoMemoryLeft(self._refused)
            for _ in range(SLOTS_PER_RANK - self._slots.fitting(rank, size)):
                fresh.append(await self._work(self._slots.make, rank, size))
        except NoMemoryLeft as error:
            log.error("rank %d gets no slots: %s", rank, error)
            for memory in fresh:
                memory.close()
            answer = rank_pb2.AgentSlots(slot_bytes=size, refused=str(error))
            self._tell(rank, generation, rank_pb2.AgentRankMessage(slots=answer))
            return
        dealt = self._slots.deal(rank, size, fresh)
        answer = rank_pb2.AgentSlots(slot_bytes=size)
        self._tell(rank, generation, rank_pb2.AgentRankMessage(slots=answer), *(s.memory.fd for s in dealt))
        self._offer(rank, at_once=True)

    def _progressed(self, rank: int, version: Version, skipped: bool) -> None:
        if version.generation != self._commit_protocol.order.generation:
            return
        if version.step >= self._progress.get(rank, 0):
            self._progress[rank] = version.step
            (self._open.discard if skipped else self._open.add)(rank)
        if self._progress.keys() >= self._commit_protocol.local:
            self._commit_protocol.stepped()
        if skipped and not self._refused:
            self._commit_protocol.skip(rank, version)
            self._replica_receiver.news()
        self._changed()

    def _declared(self, rank: int, generation: int, phase: str) -> None:
        if generation != self._commit_protocol.order.generation:
            return
        self._phases[rank] = phase[:PHASE_LETTERS]
        self._changed()

    def _filled(self, rank: int, version: Version, number: int) -> None:
        slot = self._slots.fill(rank, number)
        if slot is None:
            log.error("rank %d says that it filled slot %d, which it may not write: ignored", rank, number)
            return
        if self._commit_protocol.unwanted(version):
            self._slots.free(slot)
            return
        self._open.discard(rank)
        self._commit_protocol.filled(rank, version)
        # Not bound to its generation: what was filled before a fence counts.
        self._digesting.add((rank, version))
        self._spawn(1 << 62, self._digest(rank, version, slot))

    async def _digest(self, rank: int, version: Version, slot: Slot) -> None:
        try:
            pieces = await self._work(digest_pieces, slot.memory.view)
        except CorruptShard as error:
            log.error("rank %d's snapshot of %s is void: %s", rank, version, error)
            self._commit_protocol.give_up(version)
            self._slots.free(slot)
            self._changed()
            return
        finally:
            self._digesting.discard((rank, version))
        shard = Shard(
            rank, version, TIER_OWN, pieces, shard_digest(pieces), slot.memory, lambda: self._slots.free(slot)
        )
        if self._commit_protocol.unwanted(version):
            shard.release()
            self._changed()
            return
        self._shard_store.put(shard)
        self._replica_receiver.news()
        self._commit_protocol.take_up(shard)

    # Small questions.

    def _now(self) -> int:
        """The newest step that some rank can't keep any more. One that has not said what became of its newest may wait
        for a slot to keep it in."""
        return max((step - (rank in self._open) for rank, step in self._progress.items()), default=0)

    def _offer(self, rank: int, *, at_once: bool = False) -> None:
        """Lend a rank one free slot, for the step that all ranks keep next."""
        slot = self._slots.spare(rank)
        if slot is not None and slot.number is not None:
            self._sockets.free(rank, slot.number, 0 if at_once else self._commit_protocol.next_step, slot.fills)

    def _settled(self) -> None:
        for rank in self._commit_protocol.local:
            self._offer(rank)
        self._replica_receiver.news()
        self._changed()

    def _awaited(self, version: Version) -> bool:
        """Whether a rank of this node is still to fill a slot with this version."""
        known = self._commit_protocol
        if version.generation != known.order.generation or known.stale(version) or known.skipped >= version:
            return False
        return any(
            self._sockets.generation(rank) == version.generation and self._shard_store.own(rank, version) is None
            for rank in known.local
        )

    def _tell(self, rank: int, generation: int, message: rank_pb2.AgentRankMessage, *fds: int) -> None:
        if self._sockets.generation(rank) == generation:
            self._sockets.send(rank, message, fds)

    def _spawn(self, generation: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = generation
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the keeper of %s failed at its work", self._node, exc_info=error)
