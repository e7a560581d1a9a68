"""Rebuilds lost shards for a flush: a job that ends because a node was lost still has its last state written."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from muster.checkpoint.format.errors import CheckpointError, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import shard_digest
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.restore.recall import Rebuild
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.streams.transport import FetchFailed
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_PARITY, FlushOrder, RestorePlan


@asynccontextmanager
async def rebuilt_for_flush(
    order: FlushOrder, node: str, shard_store: ShardStore, rebuild: Rebuild, run_in_thread: WorkerThreads
) -> AsyncIterator[None]:
    """Keep the shards that `node` is to write and that no node holds in its memory inside a `with` block. The node is
    the first by name of those that hold their parity, as `Flusher` has it.

    Raises:
        FlushError: a shard can't be rebuilt.
    """
    writers: dict[int, str] = {}
    for source in order.sources:
        if source.tier == TIER_PARITY:
            writers[source.rank] = min(source.node, writers.get(source.rank, source.node))
    version, plan = Version.from_wire(order.version), RestorePlan(version=order.version, sources=order.sources)
    rebuilt: list[Shard] = []
    try:
        for rank, writer in writers.items():
            if writer == node and shard_store.find(rank, version) is None:
                rebuilt.append(await _rebuilt(rank, version, plan, rebuild, run_in_thread))
                shard_store.add(rebuilt[-1])
        yield
    finally:
        shard_store.drop(lambda shard: shard in rebuilt, "it was rebuilt for a flush, which is over")


async def _rebuilt(
    rank: int, version: Version, plan: RestorePlan, rebuild: Rebuild, run_in_thread: WorkerThreads
) -> Shard:
    async def allocate(size: int) -> SealedMemory:
        return await run_in_thread(SealedMemory, f"muster-flush-r{rank}", size)

    try:
        pieces, memory = await rebuild(rank, version, plan, allocate, NodeRestore())
    except (CheckpointError, NoMemoryLeft, FetchFailed) as error:
        raise FlushError(f"rank {rank}'s shard of {version} can't be rebuilt: {error}") from error
    return Shard(rank, version, TIER_BUDDY, pieces, shard_digest(pieces), memory, memory.close)
