"""The flushes of one agent: one at a time, and the newest order wins.

Every order reaches every agent, whether the agent writes a part or not. So each agent gives the older flush up by
itself: the older flush stops at its next check and removes its files, and only then the newer flush begins here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.locations import is_url, open_store
from muster.checkpoint.format.errors import CheckpointError, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.redundancy.wire import is_combined
from muster.checkpoint.store.flush import flush_part, flush_publish, flush_version
from muster.checkpoint.store.flush.give_up import SLOTS_NEEDED, FlushCancellation
from muster.checkpoint.store.flush.held_shards import HeldShards
from muster.checkpoint.store.flush.retention import KEEP_ALL, Retention, remove_old
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import FlushOrder, FlushProgress

log = logging.getLogger(__name__)

REMOVAL_WAIT_S = 5.0
"""Seconds for which a flush that is complete waits for the removal of older checkpoints, which goes on after that. Most
are removed in a moment, and the agent may be about to exit."""


PROGRESS_S = 2.0
"""Seconds between two reports of what was written, and between two looks whether ranks need their slots. A flush that
is over within this time copies nothing."""


Rebuild = Callable[[int, FlushOrder, WrittenBytes, FlushCancellation], Awaitable[Shard]]
"""Rank, order, what counts the bytes, what ends it early: to a shard that no node holds."""


async def open_durable(durable_dir: str, run_in_thread: WorkerThreads) -> DurableStore:
    """The store behind a durable folder, or a URL.

    Raises:
        FlushError: it can't be opened.
    """
    try:
        # Loading the packages for a store of objects takes a second.
        return await run_in_thread(open_store, durable_dir) if is_url(durable_dir) else open_store(durable_dir)
    except CheckpointError as error:
        raise FlushError(f"durable_dir = {error}") from error


class Flusher:
    """One per agent. All methods run on the agent's event loop.

    Args:
        gang_id, node: the gang and the node of this agent.
        shard_store: the shards of this node.
        committed: returns the newest version that this agent knows to be committed.
        run_in_thread: runs a function in a thread.
        on_progress: called from time to time while a flush runs.
        check_room: raises NoMemoryLeft if there is no room for a copy of so many bytes.
        rebuild: rebuilds the shard of a rank for an order; the caller releases it.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        committed: Callable[[], Version],
        run_in_thread: WorkerThreads,
        on_progress: Callable[[], None],
        check_room: Callable[[int], None],
        rebuild: Rebuild,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._committed = committed
        self._run_in_thread = run_in_thread
        self._on_progress = on_progress
        self._check_room = check_room
        self._rebuild = rebuild
        self._newest_serial = 0
        self._given_up = FlushCancellation()
        self._held: HeldShards | None = None
        """What the running flush holds; None: nothing yet, or no flush runs."""
        self._choosing: ExitStack | None = None
        """Holds the shards while the nodes agree on the version to write."""
        self._stop_during = 0
        """The newest flush when a planned stop was asked for."""
        self._one_at_a_time = asyncio.Lock()
        self._removal: asyncio.Future[None] | None = None
        self._written = WrittenBytes()

    def progress(self) -> FlushProgress | None:
        """What this node has written of the newest flush; None: none was ordered."""
        if not self._newest_serial:
            return None
        progress = FlushProgress(serial=self._newest_serial, written=self._written.done, total=self._written.total)
        if self._held is not None:
            progress.version.CopyFrom(self._held.version.to_wire())
            progress.holds_slots = self._held.holds
        return progress

    async def flush(self, order: FlushOrder, store: DurableStore, retention: Retention = KEEP_ALL) -> Version | None:
        """Write this node's part of a version. On the flush leader this returns when the whole folder is complete, and
        older folders of the gang are removed as `retention` says.

        Returns:
            On the flush leader the version that was written; None on the others.

        Whoever cancels this gives the flush up: the shards are released at once, even while a thread hangs in a dead
        file system. What such a thread still writes counts for nothing.

        Raises:
            FlushError: the flush failed or was given up. None of its files are left.
        """
        if order.serial < self._newest_serial:
            raise FlushError(
                f"flush {order.serial} is given up: flush {self._newest_serial}, a newer one, came before it"
            )
        self._newest_serial = order.serial
        self._written, self._held = WrittenBytes(), None
        self._given_up.set()
        self._given_up = given_up = FlushCancellation()
        reports = asyncio.create_task(self._watch())
        try:
            async with self._one_at_a_time:
                return await self._flush(order, store, given_up, retention)
        finally:
            reports.cancel()
            # After a cancellation a thread may still be writing.
            given_up.set()

    async def let_go_before_a_stop(self) -> None:
        """Let the ranks have all their slots: they are about to keep the last step before a planned stop. A flush whose
        bytes can't be copied in time is given up."""
        self._stop_during = self._newest_serial
        if self._choosing is not None:
            self._choosing.close()
            self._given_up.set_because(SLOTS_NEEDED)
        if self._held is not None:
            await self._held.let_go_before_a_stop()

    async def _flush(
        self, order: FlushOrder, store: DurableStore, given_up: FlushCancellation, retention: Retention
    ) -> Version | None:
        writers: dict[int, str] = {}
        """The node that writes each rank's file: the first by name of the nodes that hold the rank's shard."""
        for source in order.sources:
            writers[source.rank] = min(source.node, writers.get(source.rank, source.node))
        local_ranks = [rank for rank, node in sorted(writers.items()) if node == self._node]
        if not local_ranks:
            return None
        declarations = flush_version.declarations_folder(self._gang_id, order.serial)
        nodes = frozenset(writers.values())
        exchange = flush_version.VersionExchange(store, declarations, self._node, nodes, given_up)
        is_leader = writers.get(0) == self._node
        part: flush_part.FlushPart | None = None
        try:
            with await self._choose_shards(order, local_ranks, exchange) as self._held:
                version, sources = self._held.version, self._held.sources
                part = flush_part.FlushPart(
                    version,
                    order.serial,
                    store,
                    self._gang_id,
                    order.reason,
                    is_leader,
                    declarations,
                    given_up,
                    self._written,
                    order.job_identity,
                )
                await self._run_in_thread(flush_part.write_part, part, sources)
            # From here on no slot is held: other nodes may have much left to write.
            if is_leader:
                final_folder = await self._run_in_thread(
                    flush_publish.publish, part, sources[0].world_size, sources[0].durable_metadata
                )
                log.info("flushed %s to %s in %s: %s", version, final_folder, store.where, order.reason)
            if is_leader:
                removal = self._run_in_thread(self._remove_old, store, final_folder, order.serial, retention)
                self._removal = asyncio.ensure_future(removal)
                await asyncio.wait({self._removal}, timeout=REMOVAL_WAIT_S)
            return version if is_leader else None
        finally:
            self._held = None
            if is_leader:
                # Remove the declarations before the files: a node that still writes looks for them after its files.
                await self._run_in_thread(flush_version.remove_declarations, store, self._gang_id, order.serial)
                if part is not None:
                    await self._run_in_thread(flush_part.remove_working_folder, part)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._on_progress()
            if self._held is not None and self._stop_during == self._newest_serial:
                await self._held.let_go_before_a_stop()
            elif self._held is not None and self._held.version < self._committed():
                await self._held.let_go()

    def _remove_old(self, store: DurableStore, newest: str, serial: int, retention: Retention) -> None:
        """Remove what need not stay. The checkpoint is complete, so no error fails the flush."""
        try:
            for folder in remove_old(store, newest, self._gang_id, serial, retention):
                log.info("removed %s: durable_keep = %d, %g s", folder, retention.keep, retention.keep_s)
        except OSError as error:
            log.warning("an older checkpoint can't be removed: %s", error)

    async def _choose_shards(
        self, order: FlushOrder, ranks: list[int], exchange: flush_version.VersionExchange
    ) -> HeldShards:
        """This node's shards of the version to write: the order's version, or a newer committed one.

        What is lost is rebuilt when all nodes have said which version they hold: it takes long, and they wait.
        """
        version = Version.from_wire(order.version)
        named = {source.rank for source in order.sources if is_combined(source)}
        lost = [rank for rank in ranks if rank in named and self._shard_store.find(rank, version) is None]
        ranks = [rank for rank in ranks if rank not in lost]
        dropped = any(self._shard_store.find(rank, version) is None for rank in ranks)
        if dropped and self._committed() > version:
            version = self._committed()
        with ExitStack() as held:
            shards = [held.enter_context(self._find_shard(rank, version).held()) for rank in ranks]
            self._choosing = held
            try:
                newest = await self._run_in_thread(flush_version.choose_version, exchange, version)
            except OSError as error:
                raise FlushError(flush_part.describe_error(error, exchange.store.where)) from error
            finally:
                self._choosing = None
            if exchange.given_up.is_set():  # the shards may be released
                raise FlushError(f"flush {order.serial} is given up: {exchange.given_up.why}")
            if newest != version:
                shards = [self._find_shard(rank, newest) for rank in (*ranks, *lost)]
                lost = []
            for rank in lost:
                shards.append(await self._rebuild(rank, order, self._written, exchange.given_up))
                held.callback(shards[-1].release)
            shards.sort(key=lambda shard: shard.rank)
            # Shards of another version are released at the end of this block, because ranks wait for their slots.
            return HeldShards(newest, shards, exchange.given_up, self._run_in_thread, self._check_room)

    def _find_shard(self, rank: int, version: Version) -> Shard:
        shard = self._shard_store.find(rank, version)
        if shard is None:
            raise FlushError(
                f"{self._node} holds no shard of rank {rank} at {version}: ask again for a version that stands"
            )
        return shard
