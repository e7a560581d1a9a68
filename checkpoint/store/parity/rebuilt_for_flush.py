"""Rebuilds lost shards for a flush: a job that ends because a node was lost still has its last state written."""

import asyncio

from muster.checkpoint.format.errors import CheckpointError, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.give_up import FlushCancellation
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.memory.pieces import shard_digest
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.restore.recall import Rebuild
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.streams.transport import FetchFailed
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_BUDDY, FlushOrder, RestorePlan

LOOK_S = 0.5
"""Seconds between two looks whether the flush is given up."""


class RebuiltBytes(NodeRestore):
    """Counts rebuilt bytes as a part of a flush: who waits for it sees that it goes on."""

    def __init__(self, written: WrittenBytes) -> None:
        super().__init__()
        self._written = written

    def note_size(self, size: int) -> None:
        """A shard of so many bytes is rebuilt."""
        self._written.begin(size)

    def note_fetched(self, size: int, node: str) -> None:
        """So many bytes are rebuilt."""
        self._written.add(size)


class RebuiltForFlush:
    """Rebuilds the shards that this node writes and that no node holds. Only the flush holds them: they are no source
    of a restore, and no status reports them."""

    def __init__(self, rebuild: Rebuild, run_in_thread: WorkerThreads) -> None:
        self._rebuild = rebuild
        self._run_in_thread = run_in_thread

    async def __call__(self, rank: int, order: FlushOrder, written: WrittenBytes, given_up: FlushCancellation) -> Shard:
        """The shard of a rank at the version of the order. The caller releases it. `written` counts its bytes.

        Raises:
            FlushError: it can't be rebuilt, or the flush was given up.
        """
        version, plan = Version.from_wire(order.version), RestorePlan(version=order.version, sources=order.sources)

        async def allocate(size: int) -> SealedMemory:
            return await self._run_in_thread(SealedMemory, f"muster-flush-r{rank}", size)

        task = asyncio.ensure_future(self._rebuild(rank, version, plan, allocate, RebuiltBytes(written)))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if given_up.is_set():
                    raise FlushError(f"flush {order.serial} is given up: {given_up.why}")
            pieces, memory = await task
        except (CheckpointError, NoMemoryLeft, FetchFailed) as error:
            raise FlushError(f"rank {rank}'s shard of {version} can't be rebuilt: {error}") from error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return Shard(rank, version, TIER_BUDDY, pieces, shard_digest(pieces), memory, memory.close)
