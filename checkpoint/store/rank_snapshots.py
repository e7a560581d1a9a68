"""The snapshots of this node's ranks: from a slot that a rank has filled to a shard that is replicated.

A slot counts as full when the rank reports it as filled (`RankFilled`). It is written again only after a newer version
was committed by the whole gang, or after its own version was decided to be void.
"""

import logging
from collections.abc import Callable

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.generation_tasks import GenerationTasks
from muster.checkpoint.store.memory.pieces import digest_pieces, shard_digest
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import Slot
from muster.checkpoint.store.rank_slots import RankSlots
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_OWN
from muster.v1.rank_pb2 import RankFilled, RankProgress

log = logging.getLogger(__name__)


class RankSnapshots:
    """Runs on the agent's event loop.

    Args:
        sockets, slots: of the ranks.
        commit: takes part in committing what the ranks have filled.
        shard_store: gets the shards.
        tasks: runs what takes time.
        run_in_thread: runs a function in a thread.
        on_change: called when `progress` has something new, or a rank will have no shard of a version.
    """

    def __init__(
        self,
        sockets: RankSockets,
        slots: RankSlots,
        commit: CommitProtocol,
        shard_store: ShardStore,
        tasks: GenerationTasks,
        run_in_thread: WorkerThreads,
        on_change: Callable[[], None],
    ) -> None:
        self._sockets, self._slots, self._commit, self._shard_store = sockets, slots, commit, shard_store
        self._tasks, self._run_in_thread, self._on_change = tasks, run_in_thread, on_change
        self.on_slots_changed: Callable[[], None] = lambda: None
        """Called when a slot was digested, or will not be."""
        self._digesting: set[tuple[int, Version]] = set()
        self.begin_generation()

    def begin_generation(self) -> None:
        """A new generation runs: no rank has finished a step."""
        self.progress: dict[int, int] = {}
        """The newest finished step of each rank of this node in this generation."""
        self._undecided_ranks: set[int] = set()
        """Ranks that have neither kept nor skipped their newest step yet."""

    def is_digesting(self, rank: int, generation: int) -> bool:
        """Whether a rank has filled a slot that is no shard yet, but will be. The rank may have ended."""
        self._sockets.read_pending(rank, generation)
        return any(of == rank and version.generation == generation for of, version in self._digesting)

    def passed_step(self) -> int:
        """The newest step that some rank can no longer keep.

        A rank whose newest step is undecided may still wait for a slot, so that it has passed only the step before.
        """
        return max((step - (rank in self._undecided_ranks) for rank, step in self.progress.items()), default=0)

    def awaits_slot(self, version: Version) -> bool:
        """Whether a rank of this node may still fill a slot with this version."""
        commit = self._commit
        if version.generation != commit.order.generation or commit.stale_reason(version) or commit.skipped >= version:
            return False
        return any(
            self._sockets.generation(rank) == version.generation and self._shard_store.slot_shard(rank, version) is None
            for rank in commit.local_ranks
        )

    def note_progress(self, rank: int, generation: int, progress: RankProgress) -> None:
        """A rank has finished a step."""
        if generation != self._commit.order.generation:
            return
        if progress.step >= self.progress.get(rank, 0):
            self.progress[rank] = progress.step
            (self._undecided_ranks.discard if progress.snapshot_skipped else self._undecided_ranks.add)(rank)
        if self.progress.keys() >= self._commit.local_ranks:
            self._commit.all_ranks_stepped()
        if progress.snapshot_skipped and not self._slots.never:
            self._commit.record_skipped(rank, Version(generation, progress.step))
            self.on_slots_changed()
        self._on_change()

    def note_filled(self, rank: int, generation: int, filled: RankFilled) -> None:
        """A rank has filled a slot."""
        version, slot = Version(generation, filled.step), self._slots.pool.mark_full(rank, filled.slot)
        if slot is None:
            log.error("rank %d reports slot %d as filled, and may not write this slot: ignored", rank, filled.slot)
            return
        if self._commit.is_not_needed(version):
            self._slots.pool.mark_free(slot)
            return
        self._undecided_ranks.discard(rank)
        self._commit.record_filled(rank, version, filled.stall_us / 1e6)
        # A fence must not cancel this task: what was filled before the fence counts.
        self._digesting.add((rank, version))
        self._tasks.spawn_unfenced(self._digest_and_replicate(rank, version, slot))

    async def _digest_and_replicate(self, rank: int, version: Version, slot: Slot) -> None:
        try:
            pieces = await self._run_in_thread(digest_pieces, slot.memory.view)
        except CorruptShard as error:
            log.error("rank %d's snapshot of %s can't be used: %s", rank, version, error)
            self._commit.skip(version)
            self._slots.pool.mark_free(slot)
            self._on_change()
            return
        finally:
            self._digesting.discard((rank, version))
        digest = shard_digest(pieces)
        shard = Shard(rank, version, TIER_OWN, pieces, digest, slot.memory, lambda: self._slots.pool.mark_free(slot))
        if self._commit.is_not_needed(version):
            shard.release()
            self._on_change()
            return
        self._shard_store.add(shard)
        self.on_slots_changed()
        self._commit.start_replication(shard)
