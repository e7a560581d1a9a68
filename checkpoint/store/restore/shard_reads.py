"""Serves the ranks of a generation that put their state together from the shards of another number of ranks.

The restore plan names the holders of each old rank's shard. A rank asks for byte ranges of it. The pieces that cover
them come from this node's memory or from the other holders, from several at once, each piece once for all ranks of the
node. A piece whose bytes do not match its digest is asked of the next holder.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from muster.checkpoint.format.errors import CorruptShard, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, size_of
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.replication.dial import Dial
from muster.checkpoint.store.restore.old_shard import ByteSpan, OldShard
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import ShardHolders, Source
from muster.checkpoint.store.streams.arrivals import NotedArrivals
from muster.checkpoint.store.streams.transport import FetchFailed, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_OWN, Order, RestorePlan

PART_PIECES = 8
"""Pieces that a thread verifies or copies at least: 32 MiB."""
SHARDS_AT_ONCE = 4
"""Shards of which a node fetches pieces at the same time. Each has several streams."""


class ShardReads:
    """The old shards of one generation's restore plan.

    Args:
        gang_id, node: the gang and the node of this agent.
        shard_store: this node's shards.
        dial: returns a stub for the agent on a node.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        dial: Dial,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._holders = ShardHolders(gang_id, node, dial, lambda node: self._peer_addresses.get(node, ""))
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._plan = RestorePlan()
        self._peer_addresses: dict[str, str] = {}
        self._old_shards: dict[int, OldShard] = {}
        self._reading: set[int] = set()
        """Ranks of this node that have not said yet that they are done."""
        self._fetches = asyncio.Semaphore(SHARDS_AT_ONCE)
        self.progress = NodeRestore()

    def begin(self, order: Order, ranks: Iterable[int]) -> None:
        """Serve the ranks of this node from the plan of an order. What an earlier generation has read is let go."""
        self.close()
        self._plan = order.restore
        self._peer_addresses = {member.node: member.peer_address for member in order.members}
        self._reading = set(ranks)
        self.progress = NodeRestore(order.generation, len(self._reading) if self.written_ranks else 0)

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
            await self._fetch(old, None)
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

    async def _bring(self, old: OldShard, wanted: set[int]) -> None:
        """Have these pieces verified in the old shard's memory."""
        # Memory that is read in place is another shard's: only that shard is verified there, and nothing copied to it.
        while (absent := sorted(wanted - old.verified)) and (own := old.shard or self._own_shard(old.rank)) is not None:
            with own.held():
                intact = await self._take(old, own, absent)
            old.verified.update(intact)
            if len(intact) == len(absent):
                return
            self._shard_store.quarantine(own, f"{len(absent) - len(intact)} pieces don't match their digest")
            if old.shard is own:  # what ranks have read already stays readable: it is in memory that they have mapped
                wanted = wanted | old.verified
                old.use_own_memory(self._name(old), old.pieces)
        if absent := sorted(wanted - old.verified):
            await self._fetch(old, absent)

    async def _take(self, old: OldShard, own: Shard, numbers: list[int]) -> list[int]:
        """Verify pieces of a shard of this node, and copy them if the old shard has other memory."""

        def take(part: range) -> list[int]:
            chosen = [numbers[n] for n in part]
            if old.shard is not own:
                return old.copy(own, chosen)
            corrupt = set(own.corrupt_pieces(chosen))
            return [n for n in chosen if n not in corrupt]

        if old.shard is not own:
            old.use_own_memory(self._name(old), own.pieces)
            old.require_memory(numbers)
        found = await self._run_in_thread.in_parts(take, len(numbers), PART_PIECES)
        intact = [n for part in found for n in part]
        size = size_of([own.pieces[n] for n in intact])
        self.progress.note_size(size)
        (self.progress.note_own if old.shard is own else self.progress.note_copied)(size)
        return intact

    async def _fetch(self, old: OldShard, numbers: list[int] | None) -> None:
        """Fetch pieces from the other nodes that the plan names. None: the footer's piece alone.

        Raises:
            FetchFailed: they don't give some piece.
        """
        nodes = [s.node for s in self._plan.sources if s.rank == old.rank and s.node != self._node]
        elsewhere = [Source(node, old.rank, self._digest(old.rank)) for node in nodes]
        async with self._fetches, AsyncExitStack() as calls:
            answers = await self._holders.ask(elsewhere, self.version, calls)
            if not answers.offers:
                reasons = "; ".join(f"{node}: {reason}" for node, reason in answers.failures.items())
                raise FetchFailed(reasons or "no other node holds it")
            # All have the digest of the plan, which is made of their pieces' digests: the pieces are equal.
            pieces = answers.offers[0][1]
            old.use_own_memory(self._name(old), pieces)
            wanted = [old.footer_number] if numbers is None else numbers
            old.require_memory(wanted)
            assert old.memory is not None
            self.progress.note_size(size_of([pieces[n] for n in wanted]))
            note = partial(self._note_fetched, pieces)
            holders = [holder for *_, holder in answers.offers]
            arrivals = NotedArrivals(note)
            try:
                await self._transport.fetch(holders, pieces, wanted, old.memory, arrivals)
            finally:
                old.verified.update(arrivals.numbers)
                self._shard_store.note_damaged(old.rank, self.version, TIER_OWN, arrivals.by_node)

    def _note_fetched(self, pieces: Sequence[Piece], number: int, node: str) -> None:
        self.progress.note_fetched(pieces[number].length, node)
