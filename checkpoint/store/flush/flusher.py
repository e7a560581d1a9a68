"""One agent's share of its gang's flushes: one at a time, and the newest order wins.

An order that supersedes another comes to every agent, whether it writes a part or not. So each gives the older flush up
by itself: that ends where it next looks, takes its files away, and only then the newer one begins here.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush import flush_part, flush_version
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import FlushOrder

log = logging.getLogger(__name__)


class Flusher:
    """One per agent. All methods run on the agent's event loop.

    Args:
        gang_id, node: whose states these are, and whose memory.
        shelf: where they stand.
        committed: the newest version that this agent knows to be committed.
        work: threads.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        committed: Callable[[], Version],
        work: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._committed = committed
        self._work = work
        self._newest = 0
        self._superseded = threading.Event()
        self._turn = asyncio.Lock()

    async def flush(self, order: FlushOrder, folder: Path) -> None:
        """Write this node's share of a version; the leading node returns when the whole is in place.

        Raises:
            FlushError: it failed or was superseded. Nothing of it is left.
        """
        if order.serial < self._newest:
            raise FlushError(f"flush {order.serial} is given up: flush {self._newest}, a newer one, came before it")
        self._newest = order.serial
        self._superseded.set()
        self._superseded = superseded = threading.Event()
        try:
            async with self._turn:
                await self._write(order, folder, superseded)
        finally:
            # Where this was cancelled, a thread may still be at it.
            superseded.set()

    async def _write(self, order: FlushOrder, folder: Path, superseded: threading.Event) -> None:
        writers: dict[int, str] = {}
        for source in order.sources:
            writers[source.rank] = min(source.node, writers.get(source.rank, source.node))
        mine = [rank for rank, node in sorted(writers.items()) if node == self._node]
        if not mine:
            return
        said = flush_version.folder_of(folder, self._gang_id, order.serial)
        talk = flush_version.VersionExchange(said, self._node, frozenset(writers.values()), superseded)
        leads = writers.get(0) == self._node
        part: flush_part.FlushPart | None = None
        try:
            with ExitStack() as held:
                version, shards = await self._choose(order, mine, talk, held)
                part = flush_part.FlushPart(
                    version, order.serial, folder, self._gang_id, order.reason, leads, said, superseded
                )
                await self._work(flush_part.write, part, shards)
                if leads:
                    final = await self._work(flush_part.publish, part, shards[0])
                    log.info("flushed %s to %s: %s", version, final, order.reason)
        finally:
            if leads:
                # Before the files: who still writes looks for these words afterwards.
                await self._work(flush_version.forget, folder, self._gang_id, order.serial)
                if part is not None:
                    await self._work(flush_part.remove, part.aside)

    async def _choose(
        self, order: FlushOrder, mine: list[int], talk: flush_version.VersionExchange, held: ExitStack
    ) -> tuple[Version, list[Shard]]:
        """The version to write and this node's shards of it: the order's, or a newer one if the gang has gone on."""
        version = Version.from_wire(order.version)
        gone = any(self._shard_store.find(rank, version) is None for rank in mine)
        if gone and self._committed() > version:
            version = self._committed()
        with ExitStack() as first:
            shards = [first.enter_context(self._standing(rank, version).held()) for rank in mine]
            try:
                newest = await self._work(flush_version.agree, talk, version)
            except OSError as error:
                raise FlushError(flush_part.words(error, talk.folder.parent)) from error
            if newest != version:
                shards = [self._standing(rank, newest) for rank in mine]
            # What was held until here and isn't written is let go: its ranks want the slots.
            for shard in shards:
                held.enter_context(shard.held())
        return newest, shards

    def _standing(self, rank: int, version: Version) -> Shard:
        shard = self._shard_store.find(rank, version)
        if shard is None:
            raise FlushError(
                f"{self._node} holds no shard of rank {rank} at {version}: ask again for a version that stands"
            )
        return shard
