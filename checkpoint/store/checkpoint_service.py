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

from muster.checkpoint.format.errors import BadShard, RestoreError
from muster.checkpoint.format.versions import Stamp
from muster.checkpoint.store.commit.commit_protocol import Agreement
from muster.checkpoint.store.flush.flusher import Flusher
from muster.checkpoint.store.memory.pieces import digest_pieces, shard_digest
from muster.checkpoint.store.memory.shards import Shard, Shelf
from muster.checkpoint.store.memory.slots import SLOTS, Memory, NoMemory, Slot, Slots
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.checkpoint.store.recall import Recall
from muster.checkpoint.store.replication import transfer
from muster.checkpoint.store.replication.replica_builder import Copies
from muster.checkpoint.store.replication.replica_receiver import Desk
from muster.daemon.host.worker_threads import Workers
from muster.v1 import peer_pb2, rank_pb2
from muster.v1.agent_pb2 import TIER_OWN, FlushOrder, Order, ShardStatus
from muster.v1.common_pb2 import Version

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


class Keeper:
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
        self._work = Workers()
        self._shelf = Shelf(changed)
        self._sockets = RankSockets(self._received)
        self._slots = Slots(gang_id, self._offer)
        self._copies = Copies(gang_id, self._shelf, self._work)
        self._agreement = Agreement(gang_id, node, self._shelf, dial, self._spawn, self._settled, self._now)
        self._desk = Desk(gang_id, self._shelf, self._copies, self._agreement.stale, self._awaited)
        self._flusher = Flusher(gang_id, node, self._shelf, lambda: self._agreement.committed, self._work)
        self._recall = Recall(gang_id, node, self._shelf, self._slots, dial, self._work)
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._progress: dict[int, int] = {}
        self._open: set[int] = set()
        """Whose newest step is neither kept nor skipped yet."""
        self._phases: dict[int, str] = {}
        self._digesting: set[tuple[int, Stamp]] = set()

    # What the agent asks and tells.

    def rank_socket(self, rank: int, generation: int) -> socket:
        """A new connection for a rank; the caller hands the returned end to the process and closes it."""
        return self._sockets.open(rank, generation)

    def enlist(self, order: Order) -> None:
        """Take note of an order: who is in the gang, who leads, where the ranks' states come from.

        Said before the ranks of a generation start; saying it again changes nothing.
        """
        if self._agreement.enlist(order):
            self._progress, self._phases, self._open = {}, {}, set()
            wards = {m.node for m in order.members if m.buddy == self._node}
            self._copies.expect(p.rank for p in order.places if p.node in wards)
            self._recall.start(order, sorted(self._agreement.local))

    def fence(self, generation: int) -> None:
        """The ranks up to `generation` have ended or are ending: hear them out, replicate and commit nothing of theirs.

        What they had filled before counts. Their shards stay.
        """
        self._sockets.drop(generation)
        if generation <= self._agreement.fenced:
            return
        self._agreement.fence(generation)
        if self._agreement.order.generation <= generation:
            self._recall.cancel()
        for task, of in self._tasks.items():
            if of <= generation:
                task.cancel()
        self._desk.news()

    def shards(self) -> list[ShardStatus]:
        """All whole, digested shards in this node's memory, own and buddies'."""
        return [shard.status() for shard in self._shelf.all()]

    def committed(self) -> Version:
        """The newest version that this agent knows to be committed; (0, 0) before the first."""
        return self._agreement.committed.version()

    def progress(self) -> dict[int, int]:
        """The newest step that each rank of this node has declared in this generation."""
        return dict(self._progress)

    def phases(self) -> dict[int, str]:
        """The phase that each rank of this node has declared to be in, if any."""
        return dict(self._phases)

    def behind(self, rank: int, generation: int) -> bool:
        """Whether a rank, which may have ended, has filled a slot that is not among `shards` yet, but will be."""
        self._sockets.hear(rank, generation)
        return any(of == rank and stamp.generation == generation for of, stamp in self._digesting)

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
        own = [shard for shard in self._shelf.all() if shard.tier == TIER_OWN]
        newest = sorted({shard.stamp for shard in own})[-2:]
        return [shard for shard in own if shard.stamp in newest]

    async def take_back(self, offer: peer_pb2.ShardOffer, descriptor: int) -> None:
        """Take in a shard that this gang's agent here had left when the job was requeued; every byte is verified.

        Args:
            offer: describes it, as `transfer.offer_of` does.
            descriptor: its memfd; owned from now on.

        Raises:
            BadShard: it isn't what is described, or of another gang.
        """
        memory = Memory.adopt(descriptor)
        try:
            pieces = transfer.pieces_of(offer)
            if offer.gang_id != self._gang_id or memory.size != offer.bytes:
                raise BadShard(f"{memory.size} bytes are described as {offer.bytes} of gang {offer.gang_id}")
            await self._recall.take_in(offer.rank, transfer.stamp_of(offer), pieces, offer.digest, memory)
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
        self._copies.close()
        self._shelf.drop(lambda _: True, "the agent leaves")
        self._slots.close()
        self._work.close()

    # The PeerService's share of this part, as grpc.aio calls it.

    async def Offer(
        self, request: peer_pb2.ShardOffer, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardNeed:
        """A node whose buddy this is offers a shard."""
        return await self._desk.offer(request)

    async def Put(
        self, request_iterator: AsyncIterable[peer_pb2.ShardData], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.ShardStored:
        """The pieces that were missing."""
        return await self._desk.put(request_iterator)

    async def Fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[peer_pb2.ShardData]:
        """A node needs a whole shard for a rank that starts there."""
        async for message in self._desk.fetch(request, self._node, context):
            yield message

    async def Stored(
        self, request: peer_pb2.StoredReport, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """To the leader: a node's ranks stand twice, or never will."""
        return peer_pb2.PeerAck(refused=self._agreement.hear_report(request))

    async def Committed(
        self, request: peer_pb2.CommitNotice, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> peer_pb2.PeerAck:
        """From the leader: a version is committed, or void."""
        return peer_pb2.PeerAck(refused=self._agreement.hear_notice(request))

    # What ranks say.

    def _received(self, rank: int, generation: int, message: rank_pb2.RankMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "progress":
            self._progressed(rank, Stamp(generation, message.progress.step), message.progress.snapshot_skipped)
        elif kind == "declared":
            self._declared(rank, generation, message.declared.phase)
        elif kind == "filled":
            self._filled(rank, Stamp(generation, message.filled.step), message.filled.slot)
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
        answer.version.CopyFrom(recalled.shard.stamp.version())
        answer.bytes = recalled.shard.bytes
        with recalled.shard.held(), _closing(recalled.shard.memory.read_only()) as fd:
            self._tell(rank, generation, rank_pb2.AgentRankMessage(restore=answer), fd)

    async def _deal(self, rank: int, generation: int, size: int) -> None:
        """The rank has its state and wants slots: what no plan needs any more makes room for them."""
        keep = Stamp.of(self._agreement.order.restore.version)
        self._shelf.drop(lambda s: s.stamp.generation < generation and s.stamp != keep, "a newer generation runs")
        fresh = []
        try:
            if self._refused:
                raise NoMemory(self._refused)
            for _ in range(SLOTS - self._slots.fitting(rank, size)):
                fresh.append(await self._work(self._slots.make, rank, size))
        except NoMemory as error:
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

    def _progressed(self, rank: int, stamp: Stamp, skipped: bool) -> None:
        if stamp.generation != self._agreement.order.generation:
            return
        if stamp.step >= self._progress.get(rank, 0):
            self._progress[rank] = stamp.step
            (self._open.discard if skipped else self._open.add)(rank)
        if self._progress.keys() >= self._agreement.local:
            self._agreement.stepped()
        if skipped and not self._refused:
            self._agreement.skip(rank, stamp)
            self._desk.news()
        self._changed()

    def _declared(self, rank: int, generation: int, phase: str) -> None:
        if generation != self._agreement.order.generation:
            return
        self._phases[rank] = phase[:PHASE_LETTERS]
        self._changed()

    def _filled(self, rank: int, stamp: Stamp, number: int) -> None:
        slot = self._slots.fill(rank, number)
        if slot is None:
            log.error("rank %d says that it filled slot %d, which it may not write: ignored", rank, number)
            return
        if self._agreement.unwanted(stamp):
            self._slots.free(slot)
            return
        self._open.discard(rank)
        self._agreement.filled(rank, stamp)
        # Not bound to its generation: what was filled before a fence counts.
        self._digesting.add((rank, stamp))
        self._spawn(1 << 62, self._digest(rank, stamp, slot))

    async def _digest(self, rank: int, stamp: Stamp, slot: Slot) -> None:
        try:
            pieces = await self._work(digest_pieces, slot.memory.view)
        except BadShard as error:
            log.error("rank %d's snapshot of %s is void: %s", rank, stamp, error)
            self._agreement.give_up(stamp)
            self._slots.free(slot)
            self._changed()
            return
        finally:
            self._digesting.discard((rank, stamp))
        shard = Shard(rank, stamp, TIER_OWN, pieces, shard_digest(pieces), slot.memory, lambda: self._slots.free(slot))
        if self._agreement.unwanted(stamp):
            shard.release()
            self._changed()
            return
        self._shelf.put(shard)
        self._desk.news()
        self._agreement.take_up(shard)

    # Small questions.

    def _now(self) -> int:
        """The newest step that some rank can't keep any more. One that has not said what became of its newest may wait
        for a slot to keep it in."""
        return max((step - (rank in self._open) for rank, step in self._progress.items()), default=0)

    def _offer(self, rank: int, *, at_once: bool = False) -> None:
        """Lend a rank one free slot, for the step that all ranks keep next."""
        slot = self._slots.spare(rank)
        if slot is not None and slot.number is not None:
            self._sockets.free(rank, slot.number, 0 if at_once else self._agreement.next_step, slot.fills)

    def _settled(self) -> None:
        for rank in self._agreement.local:
            self._offer(rank)
        self._desk.news()
        self._changed()

    def _awaited(self, stamp: Stamp) -> bool:
        """Whether a rank of this node is still to fill a slot with this version."""
        known = self._agreement
        if stamp.generation != known.order.generation or known.stale(stamp) or known.skipped >= stamp:
            return False
        return any(
            self._sockets.generation(rank) == stamp.generation and self._shelf.own(rank, stamp) is None
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
