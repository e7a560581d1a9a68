"""Recall: brings the shards that a generation starts from into slots of the nodes that run the ranks.

The sources are this node's memory, and the memory of all other nodes that hold the same pieces. The recall starts for
all ranks of this node when the order arrives, while the rank processes still start. Every byte is verified before a
rank can see it. A rank gets exactly the version of the restore plan, or an error: versions are never mixed. A plan
without a version names a durable folder, which each rank reads by itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial

from muster.checkpoint.format.errors import CheckpointError, RestoreError
from muster.checkpoint.format.versions import Version, source_rank
from muster.checkpoint.redundancy.wire import is_combined
from muster.checkpoint.store.memory.pieces import Piece, shard_digest, size_of, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import SlotPool
from muster.checkpoint.store.restore.piece_gathering import PART_PIECES, PieceGathering, WantedShard
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import ShardHolders, Source
from muster.checkpoint.store.streams.transport import FetchFailed, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_OWN, Order, RestorePlan, RestoreSource

log = logging.getLogger(__name__)

MOST_OTHERS = 3
"""Nodes with other ranks' shards that are asked for equal pieces, beside those that hold the rank's own shard."""
REPORT_S = 0.25
"""Seconds between two reports of the progress."""


@dataclass(frozen=True)
class RecalledState:
    """What a rank starts from: a shard in a slot of this node, or a durable folder, or neither (a fresh start).
    `skip_to_step` as in RestorePlan."""

    shard: Shard | None = None
    durable_path: str = ""
    skip_to_step: int = 0


Rebuild = Callable[
    [int, Version, RestorePlan, Callable[[int], Awaitable[SealedMemory]], NodeRestore],
    Awaitable[tuple[tuple[Piece, ...], SealedMemory]],
]
"""Rank, version, plan, what allocates memory of some bytes, progress: to the pieces of the shard and their bytes."""


class Recall:
    """The recalls of one generation on this node.

    Args:
        node: of this agent.
        shard_store, slots: where shards are found, and where recalled shards are added.
        holders: asks other nodes for shards.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
        on_change: called now and then while a recall runs: `progress` has something new.
        rebuild: rebuilds a shard of which there is no copy.
    """

    def __init__(
        self,
        node: str,
        shard_store: ShardStore,
        slots: SlotPool,
        holders: ShardHolders,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
        on_change: Callable[[], None],
        rebuild: Rebuild,
    ) -> None:
        self._node = node
        self._shard_store = shard_store
        self._slots = slots
        self._holders = holders
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._on_change = on_change
        self._rebuild = rebuild
        self.progress = NodeRestore()
        self._reports: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[RecalledState]] = {}

    def start(self, order: Order, ranks: Sequence[int]) -> None:
        """Start the recalls for the ranks of this node. Recalls of an earlier generation are cancelled."""
        self.cancel()
        self.progress = progress = NodeRestore(order.generation, len(ranks) if order.restore.sources else 0)
        gathering = PieceGathering(self._shard_store, self._holders, self._transport, self._run_in_thread, progress)
        for rank in ranks:
            work = self._recall(rank, order.restore, gathering, progress)
            task = asyncio.create_task(work, name=f"recall rank {rank}")
            # `wait_for` raises the error for the rank that asks. Without such a rank, asyncio must not log the error.
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            self._tasks[rank] = task
        if self._tasks and order.restore.sources:
            self._reports = asyncio.create_task(self._report(set(self._tasks.values()), gathering))

    async def _report(self, tasks: set[asyncio.Task[RecalledState]], gathering: PieceGathering) -> None:
        """Have the progress reported until all recalls have ended."""
        while tasks:
            _, tasks = await asyncio.wait(tasks, timeout=REPORT_S)
            self._on_change()
        gathering.forget_arrivals()

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
        if self._reports is not None:
            self._reports.cancel()

    async def _recall(
        self, rank: int, plan: RestorePlan, gathering: PieceGathering, progress: NodeRestore
    ) -> RecalledState:
        version = Version.from_wire(plan.version)
        if not plan.HasField("version"):
            return RecalledState(durable_path=plan.durable_path, skip_to_step=plan.skip_to_step)
        failures: dict[str, str] = {}
        try:
            shard = await self._recall_from_memory(rank, version, plan, gathering, progress, failures)
            progress.note_rank_done()
            return RecalledState(shard)
        except (CheckpointError, NoMemoryLeft, FetchFailed) as error:
            reasons = "; ".join([*(f"{node}: {reason}" for node, reason in failures.items()), str(error)])
            log.error("rank %d's state at %s can't be had: %s", rank, version, reasons)
            raise RestoreError(f"rank {rank}'s state at {version} can't be had: {reasons}") from None

    async def _recall_from_memory(
        self,
        rank: int,
        version: Version,
        plan: RestorePlan,
        gathering: PieceGathering,
        progress: NodeRestore,
        failures: dict[str, str],
    ) -> Shard:
        """The shard in a slot of this node, verified. What goes wrong with single nodes is added to `failures`."""
        wrote = source_rank(rank, plan.written_ranks)
        sources = [s for s in plan.sources if s.rank == wrote and not is_combined(s)]
        if not sources and any(s.rank == wrote for s in plan.sources):
            return await self._rebuild_shard(rank, wrote, version, plan, progress)
        digest = next((s.digest for s in sources if s.digest), "")
        elsewhere = [Source(s.node, wrote, digest) for s in sources if s.node != self._node]
        async with AsyncExitStack() as calls:
            hold = calls.enter_context(ExitStack())
            here = self._on_this_node(wrote, version, digest, sources, failures)
            wanted = WantedShard(rank, version, elsewhere, calls, failures)
            if here is not None:
                hold.enter_context(here.held())
                progress.note_size(here.bytes)
                wanted.pieces = here.pieces
                if here.tier == TIER_OWN and wrote == rank:
                    corrupt = await self._corrupt_pieces(here)
                    if not corrupt:
                        progress.note_own(here.bytes)
                        return here
                    failures[self._node] = f"{len(corrupt)} of {len(here.pieces)} pieces don't match their digest"
                    self._shard_store.quarantine(here, failures[self._node], len(corrupt))
                    wanted.intact = here, set(range(len(here.pieces))) - corrupt
            else:
                await gathering.find_pieces(wanted)
                progress.note_size(size_of(wanted.pieces))
            wanted.others = self._other_sources(wrote, plan)
            wanted.memory = self._allocate(wanted, hold)
            # The kernel takes longer to find new memory than bytes take to come: a thread keeps ahead of them.
            allocating = asyncio.ensure_future(self._run_in_thread(wanted.memory.allocate))
            try:
                await gathering.gather(wanted)
                await allocating
            except BaseException:
                wanted.memory.close()
                allocating.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise
            return self._store(rank, version, wanted.pieces, shard_digest(wanted.pieces), wanted.memory)

    async def _rebuild_shard(
        self, rank: int, wrote: int, version: Version, plan: RestorePlan, progress: NodeRestore
    ) -> Shard:
        """The shard of which there is no copy, in a slot of this node, verified."""

        async def allocate(size: int) -> SealedMemory:
            return await self._run_in_thread(self._slots.allocate, rank, size)

        pieces, memory = await self._rebuild(wrote, version, plan, allocate, progress)
        return self._store(rank, version, pieces, shard_digest(pieces), memory)

    def _allocate(self, wanted: WantedShard, hold: ExitStack) -> SealedMemory:
        """Memory for a shard. If there is too little, the corrupt copy in this node's memory is given up first."""
        size = size_of(wanted.pieces)
        try:
            return self._slots.allocate(wanted.rank, size, later=True)
        except NoMemoryLeft:
            if wanted.intact is None:
                raise
            wanted.intact = None
            hold.close()
            return self._slots.allocate(wanted.rank, size, later=True)

    def _on_this_node(
        self, rank: int, version: Version, digest: str, sources: Sequence[RestoreSource], failures: dict[str, str]
    ) -> Shard | None:
        """The rank's shard in this node's memory, if it is the one that the sources name."""
        shard = self._shard_store.find(rank, version)
        named = any(source.node == self._node for source in sources)
        if shard is not None and (shard.digest.hex() == digest if digest else named):
            return shard
        if named and shard is None:
            failures[self._node] = "its memory holds no such shard"
        elif named and shard is not None:
            failures[self._node] = f"the shard's digest is {shard.digest.hex()}, the order says {digest}"
        return None

    async def _corrupt_pieces(self, shard: Shard) -> set[int]:
        found = await self._run_in_thread.in_parts(shard.corrupt_pieces, len(shard.pieces), PART_PIECES)
        return {n for part in found for n in part}

    def _other_sources(self, rank: int, plan: RestorePlan) -> list[Source]:
        """Shards of other ranks on other nodes, which may have equal pieces: half the ranks away first, then a quarter.

        Data-parallel replicas are most often so far apart, whatever lies inside them.
        """
        by_rank: dict[int, RestoreSource] = {}
        for source in plan.sources:
            if source.node != self._node and not is_combined(source):
                by_rank.setdefault(source.rank, source)
        mine = {s.node for s in plan.sources if s.rank == rank}
        count = 1 + max((s.rank for s in plan.sources), default=0)
        found: dict[str, Source] = {}
        for parts in (2, 4, 8, count):
            for part in range(1, parts):
                other = by_rank.get((rank + part * count // parts) % count)
                if other is not None and other.node not in mine and len(found) < MOST_OTHERS:
                    found.setdefault(other.node, Source(other.node, other.rank, other.digest))
        return list(found.values())

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
