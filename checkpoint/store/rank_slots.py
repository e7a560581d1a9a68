"""Gives the ranks of this node their slots: memory for two snapshots each, if the node has it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from muster.checkpoint.store.commit.commit_protocol import CommitProtocol
from muster.checkpoint.store.kept_for_others import why_unable
from muster.checkpoint.store.memory.memory_need import CopiesOfOthers, check_bytes, check_memory
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.slots import SLOTS_PER_RANK, Slot, SlotPool
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import rank_pb2
from muster.wording import counted

log = logging.getLogger(__name__)


class RankSlots:
    """The slots of this node's ranks.

    Args:
        gang_id: part of the names of the memfds.
        sockets: of the ranks.
        commit: says which step is kept next.
        spawn: runs a task that no fence cancels.
        run_in_thread: runs a function in a thread.
        on_change: called when `refused` has something new.
        never: why no rank gets slots; empty if ranks get slots.
        upload_bytes: memory that uploads of durable checkpoints take besides.
    """

    def __init__(
        self,
        gang_id: str,
        sockets: RankSockets,
        commit: CommitProtocol,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        run_in_thread: WorkerThreads,
        on_change: Callable[[], None],
        never: str,
        upload_bytes: int,
    ) -> None:
        self.pool = SlotPool(gang_id, self.grant_free)
        self.copies = CopiesOfOthers()
        """What the copies of other nodes' states need."""
        self._sockets, self._commit, self._spawn, self._run_in_thread = sockets, commit, spawn, run_in_thread
        self._on_change, self.never, self._upload_bytes = on_change, never, upload_bytes
        self._with_slots: set[int] = set()
        self._without_slots: dict[int, str] = {}
        """Why ranks of this generation have no slots, by rank."""
        self._expected: dict[int, int] = {}
        """The bytes of the state that ranks of this generation read, by rank."""
        self._reserved_bytes = 0

    @property
    def refused(self) -> str:
        """Why a rank of this generation has no slots; empty: each rank that asked has them, or no rank gets any."""
        return "" if self.never else next(iter(self._without_slots.values()), "")

    def begin_generation(self) -> None:
        """Other ranks are here than before, and other shards are kept for other nodes."""
        self._with_slots, self._without_slots, self._expected = set(), {}, {}
        local_ranks = self._commit.local_ranks
        places = self._commit.places
        self.copies = CopiesOfOthers(
            len(places.copied_ranks), len(local_ranks), share_of_parts=places.share_of_parts, words=places.words
        )
        self.pool.retire_all_but(local_ranks)

    def expect(self, rank: int, size: int) -> None:
        """A rank reads so many bytes of a durable checkpoint, so each of its slots will hold as many. If the slots of
        the ranks on this node can't fit, this is said now. Ranks ask for slots only after their first step. Before
        that, nobody knows which bytes other ranks hold, too, so whole copies are not counted."""
        if self.never or self._without_slots or rank in self._with_slots:
            return
        self._expected[rank] = size
        self.copies.note(rank, size, shared_bytes=size)
        waiting = self._expected.keys() - self._with_slots
        needed = (max(0, SLOTS_PER_RANK * self._expected[one] - self.pool.bytes_of(one)) for one in waiting)
        new_bytes = max(0, sum(needed) - self.pool.reserve.bytes)
        words = f"rank {rank} needs" if len(waiting) == 1 else f"{counted(len(waiting), 'rank')} of this node need"
        try:
            check_bytes(f"{words} {new_bytes >> 20} MiB for slots", new_bytes, self.copies, self._upload_bytes)
        except NoMemoryLeft as error:
            log.error("rank %d will get no slots: %s", rank, error)
            self._without_slots[rank] = str(error)

    async def answer(self, rank: int, generation: int, layout: rank_pb2.RankLayout) -> None:
        """Give a rank its slots, or say why it gets none."""
        self._commit.record_new_slots(rank, generation)
        answer, slots = await self.give(rank, layout.slot_bytes, layout.shared_bytes)
        message = rank_pb2.AgentRankMessage(slots=answer)
        self._sockets.send_in(generation, rank, message, *(slot.memory.fd for slot in slots))
        if slots:
            self.grant_free(rank, for_any_step=True)

    async def give(self, rank: int, size: int, shared_bytes: int) -> tuple[rank_pb2.AgentSlots, list[Slot]]:
        """Have two slots of `size` bytes for a rank: those that it has, and new ones.

        Args:
            rank: the rank that asks.
            size: of a slot.
            shared_bytes: those that other ranks hold as well.

        Returns:
            The answer for the rank, and its slots; none if they are refused.
        """
        new_memories: list[SealedMemory] = []
        try:
            if why := self.never or why_unable(self._commit.places):
                raise NoMemoryLeft(why)
            self.pool.close_free_of_other_sizes(rank, size)  # the rank no longer writes to these
            new_slots = SLOTS_PER_RANK - self.pool.count_of_size(rank, size)
            self.copies.note(rank, size, shared_bytes)
            check_memory(rank, new_slots - self.pool.reserve.count(size), size, self.copies, self._upload_bytes)
            await self._allocate(rank, size, new_slots, new_memories)
        except NoMemoryLeft as error:
            for memory in new_memories:
                memory.close()
            if rank not in self._without_slots:  # it asks again and again
                log.error("rank %d gets no slots: %s", rank, error)
            self._without_slots[rank] = str(error)
            self._on_change()
            return rank_pb2.AgentSlots(slot_bytes=size, refused=str(error)), []
        slots = self.pool.assign(rank, size, new_memories)
        if self._without_slots.pop(rank, ""):
            self._on_change()
        self._with_slots.add(rank)
        if self._with_slots >= self._commit.local_ranks:
            self._reserved_bytes = 0
            self.pool.reserve.drop()  # all ranks of this node have what they need
        return rank_pb2.AgentSlots(slot_bytes=size), slots

    async def _allocate(self, rank: int, size: int, count: int, allocated: list[SealedMemory]) -> None:
        """Append `count` memories to `allocated`, of which a thread each allocates the pages.

        Raises:
            NoMemoryLeft: there is too little memory for one of them. Others may have been allocated.
        """

        async def allocate() -> None:
            allocated.append(await self._run_in_thread(self.pool.allocate, rank, size))

        outcomes = await asyncio.gather(*(allocate() for _ in range(count)), return_exceptions=True)
        for failure in filter(None, outcomes):
            raise failure

    def grant_free(self, rank: int, *, for_any_step: bool = False) -> None:
        """Let a rank write one free slot, for the step that all ranks keep next."""
        slot = self.pool.next_free(rank)
        if slot is not None and slot.number is not None:
            from_step = 0 if for_any_step else self._commit.next_step
            self._sockets.grant_slot(rank, slot.number, from_step, slot.fill_count)

    def reserve(self, slot_bytes: int, ranks: int) -> None:
        """Keep memory ready for so many ranks with slots of this size. They may come when a node is lost."""
        if not self.never and slot_bytes > self._reserved_bytes:
            self._reserved_bytes = slot_bytes
            self._spawn(self._fill_reserve(slot_bytes, SLOTS_PER_RANK * ranks))

    async def _fill_reserve(self, slot_bytes: int, count: int) -> None:
        try:
            await self._run_in_thread(self.pool.reserve.fill, slot_bytes, count)
        except NoMemoryLeft as error:
            log.warning("ranks that move here will wait for memory: %s", error)
