"""Brings the pieces of a shard into new memory: copies what other memory of this node holds, and fetches the rest from
all nodes that hold it.

Pieces are known by their digests, so it does not matter whose shard a piece is found in. Ranks of one node that need
the same pieces, as data-parallel ranks do, fetch them once: one rank fetches, the others copy. Every piece is verified
in its new place. A shard of this node whose piece does not match any more is quarantined.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import Answers, ShardHolders, Source, usable_for
from muster.checkpoint.store.streams.arrivals import NotedArrivals
from muster.checkpoint.store.streams.piece_fetch import BATCH_PIECES
from muster.checkpoint.store.streams.transport import FetchFailed, Holder, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_OWN
from muster.wording import counted

log = logging.getLogger(__name__)

PART_PIECES = 16
"""Pieces that a thread verifies or copies at least: 64 MiB, some milliseconds."""

DAMAGED_ATTEMPTS = 3
"""Fetches in which nothing has come but damaged pieces: then the holder or the way to it is at fault."""


@dataclass
class WantedShard:
    """A shard that is brought into `memory`. `pieces`: which ones, as its holders say.

    `sources`: the nodes that hold it. `others`: shards of other ranks, elsewhere, that may have equal pieces.
    `intact`: a shard of this node that is no source any more, and those of its pieces that still match.
    `calls`: keep the holders' offers open.
    `failures`: why nodes give nothing, by node.
    """

    rank: int
    version: Version
    sources: Sequence[Source]
    calls: AsyncExitStack
    failures: dict[str, str]
    others: Sequence[Source] = ()
    pieces: tuple[Piece, ...] = ()
    intact: tuple[Shard, set[int]] | None = None
    answers: Answers | None = None
    memory: SealedMemory = field(init=False)
    attempts_left: int = DAMAGED_ATTEMPTS

    def reasons(self, error: Exception) -> str:
        """Why it can't be had: what single nodes have said, and what was raised at last."""
        return "; ".join([*(f"{node}: {reason}" for node, reason in self.failures.items()), str(error)])


class PieceGathering:
    """For all ranks of this node in one generation.

    Args:
        shard_store: the shards of this node.
        holders: asks other nodes for theirs.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
        restore: is told of all bytes.
    """

    def __init__(
        self,
        shard_store: ShardStore,
        holders: ShardHolders,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
        restore: NodeRestore,
    ) -> None:
        self._shard_store = shard_store
        self._holders = holders
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._restore = restore
        self._under_way: dict[bytes, asyncio.Event] = {}
        """Digests of the pieces that some rank fetches now, and what is set when that fetch is over."""
        self._arrived: dict[bytes, tuple[SealedMemory, Piece]] = {}
        """Where fetched pieces are. Their shards may not be complete yet."""

    async def find_pieces(self, wanted: WantedShard) -> None:
        """Ask the holders of a shard for its pieces and their digests.

        Raises:
            FetchFailed: nobody holds it.
        """
        offers = (await self._answers(wanted)).offers
        if not offers:
            raise FetchFailed("no other source holds it" if wanted.failures else "no source holds it")
        wanted.pieces = offers[0][1]

    async def gather(self, wanted: WantedShard, numbers: Iterable[int] | None = None) -> None:
        """Bring the numbered pieces into the memory; None: all of them. They are verified when this returns.

        Raises:
            FetchFailed: some pieces are nowhere. The message says why, node by node.
        """
        absent = set(range(len(wanted.pieces)) if numbers is None else numbers)
        while absent:
            copied = await self._copy_from_this_node(wanted, absent)
            self._restore.note_copied(sum(wanted.pieces[n].length for n in copied))
            absent -= copied
            fetched = self._first_of_each(wanted.pieces, absent)
            if fetched:
                absent -= await self._fetch(wanted, fetched)
            elif absent:
                await self._under_way[wanted.pieces[min(absent)].digest].wait()

    def forget_arrivals(self) -> None:
        """All ranks of this node are done."""
        self._arrived.clear()

    def _first_of_each(self, pieces: Sequence[Piece], absent: Iterable[int]) -> list[int]:
        """The first absent piece with each digest that nobody fetches yet."""
        first: dict[bytes, int] = {}
        for n in sorted(absent):
            if pieces[n].digest not in self._under_way:
                first.setdefault(pieces[n].digest, n)
        return list(first.values())

    # From this node.

    async def _copy_from_this_node(self, wanted: WantedShard, absent: Collection[int]) -> set[int]:
        """Copy what this node holds; returns the numbers of the pieces that are in their places now, verified."""
        places = self._locate(wanted, absent)
        copies = [(n, shard, data) for n, (shard, _, data) in places.items()]
        target, pieces = wanted.memory.view, wanted.pieces

        def copy(part: range) -> list[int]:
            damaged = []
            for n, _, data in (copies[i] for i in part):
                piece = pieces[n]
                place = target[piece.offset : piece.offset + piece.length]
                if len(data) == piece.length:
                    place[:] = data
                if digest_of(place) != piece.digest:
                    damaged.append(n)
            return damaged

        with ExitStack() as held:
            for shard in {id(shard): shard for _, shard, _ in copies if shard is not None}.values():
                held.enter_context(shard.held())
            parts = await self._run_in_thread.in_parts(copy, len(copies), PART_PIECES)
            damaged = {n for part in parts for n in part}
        self._note_damaged(wanted, {n: places[n] for n in damaged})
        return places.keys() - damaged

    def _locate(self, wanted: WantedShard, absent: Collection[int]) -> dict[int, tuple[Shard | None, int, memoryview]]:
        """Where absent pieces are on this node: their shard (None: it is not complete yet), number there, and bytes."""
        places: dict[int, tuple[Shard | None, int, memoryview]] = {}
        numbers: dict[bytes, list[int]] = {}
        for n in absent:
            numbers.setdefault(wanted.pieces[n].digest, []).append(n)
        for digest in numbers.keys() & self._arrived.keys():
            memory, piece = self._arrived[digest]
            data = memory.view[piece.offset : piece.offset + piece.length]
            places.update({n: (None, 0, data) for n in numbers.pop(digest)})
        if wanted.intact is not None:
            shard, intact = wanted.intact
            for n in sorted(intact & set(absent)):
                places.update({m: (shard, n, shard.piece(n)) for m in numbers.pop(shard.pieces[n].digest, ())})
        for shard in self._shard_store.all():
            for number, piece in enumerate(shard.pieces):
                for n in numbers.pop(piece.digest, ()):
                    of, its_number = shard.location(number)
                    places[n] = (of, its_number, of.piece(its_number))
        return places

    def _note_damaged(self, wanted: WantedShard, places: "dict[int, tuple[Shard | None, int, memoryview]]") -> None:
        """Never copy from there again."""
        corrupt: Counter[Shard] = Counter()
        for n, (shard, number, _) in places.items():
            if shard is None:
                self._arrived.pop(wanted.pieces[n].digest, None)
            elif wanted.intact is not None and shard is wanted.intact[0]:
                wanted.intact[1].discard(number)
            else:
                corrupt[shard] += 1
        for shard, count in corrupt.items():
            self._shard_store.quarantine(shard, f"{counted(count, 'piece')} did not match in the copy", count)

    # From other nodes.

    async def _fetch(self, wanted: WantedShard, numbers: Sequence[int]) -> set[int]:
        """Fetch pieces from all who hold them; returns the numbers of those that have come."""
        over, digests = asyncio.Event(), [wanted.pieces[n].digest for n in numbers]
        self._under_way.update(dict.fromkeys(digests, over))
        arrivals = NotedArrivals(lambda n, node: self._restore.note_fetched(wanted.pieces[n].length, node))
        try:
            holders = await self._find_holders(wanted, numbers)
            await self._transport.fetch(holders, wanted.pieces, numbers, wanted.memory, arrivals, restoring=True)
        except FetchFailed as error:
            wanted.attempts_left -= not arrivals.numbers
            if not arrivals.numbers and not (arrivals.by_node and wanted.attempts_left):
                raise
            log.warning("rank %d's state at %s: %s; asking again", wanted.rank, wanted.version, error)
            wanted.answers = None
        finally:
            self._arrived.update({wanted.pieces[n].digest: (wanted.memory, wanted.pieces[n]) for n in arrivals.numbers})
            for digest in digests:
                self._under_way.pop(digest, None)
            over.set()
            self._shard_store.note_damaged(wanted.rank, wanted.version, TIER_OWN, arrivals.by_node)
        return arrivals.numbers

    async def _find_holders(self, wanted: WantedShard, numbers: Sequence[int]) -> list[Holder]:
        offers = list((await self._answers(wanted)).offers)
        if len(numbers) > BATCH_PIECES and wanted.others:  # fewer pieces come from one holder as soon
            others = await self._holders.ask(wanted.others, wanted.version, wanted.calls, at_once=True)
            known = {source.node for source, _, _ in offers}
            offers += [offer for offer in others.offers if offer[0].node not in known]
        usable = (usable_for(wanted.pieces, numbers, pieces, holder) for _, pieces, holder in offers)
        return [holder for holder in usable if holder is not None]

    async def _answers(self, wanted: WantedShard) -> Answers:
        if wanted.answers is None:
            wanted.answers = await self._holders.ask(wanted.sources, wanted.version, wanted.calls)
            wanted.failures.update(wanted.answers.failures)
        return wanted.answers
