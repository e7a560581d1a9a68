"""Serves the ranks of a generation that put their state together from the shards of another number of ranks.

The restore plan names the holders of each old rank's shard. A rank asks for byte ranges of it. The pieces that cover
them come from this node's memory or from the other holders, from several at once, each piece once for all ranks of the
node. A piece whose bytes do not match its digest is asked of the next holder.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack

from muster.checkpoint.format.errors import CorruptShard, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import size_of
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.restore.old_shard import ByteSpan, OldShard
from muster.checkpoint.store.restore.piece_gathering import PART_PIECES, PieceGathering, WantedShard
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import ShardHolders, Source
from muster.checkpoint.store.streams.transport import FetchFailed, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import Order, RestorePlan
from muster.wording import counted

SHARDS_AT_ONCE = 4
"""Shards of which a node fetches pieces at the same time. Each has several streams."""


class ShardReads:
    """The old shards of one generation's restore plan.

    Args:
        gang_id, node: the gang and the node of this agent.
        shard_store: this node's shards.
        holders: asks other nodes for theirs.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        holders: ShardHolders,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._holders = holders
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._plan = RestorePlan()
        self._old_shards: dict[int, OldShard] = {}
        self._reading: set[int] = set()
        """Ranks of this node that have not said yet that they are done."""
        self._fetches = asyncio.Semaphore(SHARDS_AT_ONCE)
        self.progress = NodeRestore()
        self._gathering = self._new_gathering()

    def begin(self, order: Order, ranks: Iterable[int]) -> None:
        """Serve the ranks of this node from the plan of an order. What an earlier generation has read is let go."""
        self.close()
        self._plan = order.restore
        self._reading = set(ranks)
        self.progress = NodeRestore(order.generation, len(self._reading) if self.written_ranks else 0)
        self._gathering = self._new_gathering()

    def _new_gathering(self) -> PieceGathering:
        return PieceGathering(self._shard_store, self._holders, self._transport, self._run_in_thread, self.progress)

    @property
    def written_ranks(self) -> int:
        """How many ranks wrote what this generation starts from; 0: each rank loads a shard of its own, or none."""
        return self._plan.written_ranks if self._plan.resharded else 0

    @property
    def version(self) -> Version:
        """The version that is restored."""
        return Version.from_wire(self._plan.version)

    def done(self, rank: int) -> None:
        """A rank reads no more. When all ranks of this node are done, the memory is let go."""
        if rank in self._reading:
            self.progress.note_rank_done()
        self._reading.discard(rank)
        if not self._reading:
            self._let_go()

    def close(self) -> None:
        """Serve no more reads. Call this only when no `read` runs, or after those are cancelled."""
        self._plan = RestorePlan()
        self._reading = set()
        self._let_go()

    def _let_go(self) -> None:
        shards, self._old_shards = self._old_shards, {}
        for old in shards.values():
            old.close()
        self._gathering.forget_arrivals()

    async def read(self, rank: int, header: bool, spans: Sequence[ByteSpan]) -> SealedMemory:
        """Memory of an old rank's shard in which these bytes are verified.

        Args:
            rank: the old rank.
            header: read everything from the shard's index on, too.
            spans: bytes of the shard.

        Raises:
            RestoreError: no holder has some of these bytes intact, or the plan names no such rank.
        """
        if rank >= self.written_ranks:
            raise RestoreError(
                f"the order has no shard of rank {rank}: {self.written_ranks} ranks wrote {self.version}"
            )
        old = self._old_shards.setdefault(rank, OldShard(rank))
        try:
            async with old.turn:
                return await self._read(old, header, spans)
        except (CorruptShard, NoMemoryLeft, FetchFailed) as error:
            raise RestoreError(f"rank {rank}'s shard of {self.version} can't be read: {error}") from None

    async def _read(self, old: OldShard, header: bool, spans: Sequence[ByteSpan]) -> SealedMemory:
        own = self._own_shard(old.rank)
        if not old.pieces and own is not None:
            self._use(old, own)
        if not old.pieces:  # nobody here knows the pieces: the first fetch brings the footer alone
            await self._gather(old, None)
        if header:
            await self._bring(old, {old.footer_number})
            spans = [*spans, old.header()]
        await self._bring(old, old.numbers_of(spans))
        assert old.memory is not None
        return old.memory

    def _own_shard(self, rank: int) -> Shard | None:
        """The shard of an old rank in this node's memory, if it is the one that the plan names."""
        shard = self._shard_store.find(rank, self.version)
        return shard if shard is not None and shard.digest.hex() == self._digest(rank) else None

    def _digest(self, rank: int) -> str:
        """The digest of an old rank's shard, in hex: of the first source that names it. All sources hold the same."""
        return next((s.digest for s in self._plan.sources if s.rank == rank and s.digest), "")

    def _use(self, old: OldShard, own: Shard) -> None:
        """Read from a shard of this node: in place, or copied if some of its pieces are in other shards."""
        if not own.references:
            old.use_memory_of(own)
        else:
            old.use_own_memory(self._name(old), own.pieces)

    def _name(self, old: OldShard) -> str:
        return f"muster-{self._gang_id}-r{old.rank}-old"

    async def _bring(self, old: OldShard, numbers: set[int]) -> None:
        """Have these pieces verified in the old shard's memory."""
        absent, own = numbers - old.verified, old.shard
        if not absent or own is None:
            await self._gather(old, absent)
            return
        with own.held():
            intact = await self._verify(own, absent)
            old.verified |= intact
            if intact == absent:
                return
            corrupt = len(absent - intact)
            self._shard_store.quarantine(own, f"wrong digest of {counted(corrupt, 'piece')}", corrupt)
            # Only this shard was verified in its memory, so nothing is copied to it. What ranks have read already stays
            # readable: it is in memory that they have mapped.
            intact, absent = set(old.verified), absent | old.verified
            old.use_own_memory(self._name(old), old.pieces)
            await self._gather(old, absent, (own, intact))

    async def _verify(self, own: Shard, numbers: set[int]) -> set[int]:
        """Verify pieces of a shard of this node where they are; returns the numbers of those that match."""
        ordered = sorted(numbers)

        def corrupt(part: range) -> list[int]:
            return own.corrupt_pieces(ordered[n] for n in part)

        found = await self._run_in_thread.in_parts(corrupt, len(ordered), PART_PIECES)
        intact = numbers.difference(*found)
        size = size_of([own.pieces[n] for n in intact])
        self.progress.note_size(size)
        self.progress.note_own(size)
        return intact

    async def _gather(
        self, old: OldShard, numbers: set[int] | None, intact: tuple[Shard, set[int]] | None = None
    ) -> None:
        """Bring pieces into the old shard's own memory. None: the footer's piece alone.

        `intact`: a shard of this node that is used no more, and those of its pieces that still match.

        Raises:
            FetchFailed: some piece is nowhere.
        """
        if numbers is not None and not numbers:
            return
        nodes = [s.node for s in self._plan.sources if s.rank == old.rank and s.node != self._node]
        sources = [Source(node, old.rank, self._digest(old.rank)) for node in nodes]
        async with self._fetches, AsyncExitStack() as calls:
            wanted = WantedShard(old.rank, self.version, sources, calls, {}, pieces=old.pieces, intact=intact)
            try:
                if not wanted.pieces:
                    await self._gathering.find_pieces(wanted)
                old.use_own_memory(self._name(old), wanted.pieces)
                numbers = {old.footer_number} if numbers is None else numbers
                old.require_memory(numbers)
                assert old.memory is not None
                wanted.memory = old.memory
                self.progress.note_size(size_of([wanted.pieces[n] for n in numbers]))
                await self._gathering.gather(wanted, numbers)
            except FetchFailed as error:
                raise FetchFailed(wanted.reasons(error)) from None
            old.verified |= numbers
