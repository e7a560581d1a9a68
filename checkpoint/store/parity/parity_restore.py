"""Rebuilds the shard of a lost rank: the XOR of its parity and of all other shards that the parity combines.

The holders of the parity say which shards these are, and the digest of each piece of the lost one. The pieces of all
sources come into a small staging memory, verified, and are added in the place of the lost piece, which must match its
own digest then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, size_of, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.store.parity.parity_part import PartKey
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import Dial, host_of
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import OFFER_TIMEOUT_S, ShardHolders, Source
from muster.checkpoint.store.streams.transport import FetchFailed, Holder, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN, TIER_PARITY, RestorePlan, RestoreSource

log = logging.getLogger(__name__)

WINDOW_PIECES = 8
"""Pieces that are rebuilt at a time: each source needs 32 MiB of staging memory for them."""
WINDOWS_AT_ONCE = 3
"""While one is fetched, another one can be added."""


class _Held(NamedTuple):
    """A shard, or a part of a parity, on other nodes."""

    holders: Sequence[Holder]
    pieces: tuple[Piece, ...]


@dataclass
class _Source:
    """What is added to the lost pieces. `places`: the pieces of a shard or a part, as they are staged.

    `numbers`: the numbers of these pieces, by the numbers of the lost pieces that they are added to.
    """

    holders: Sequence[Holder]
    places: list[Piece]
    numbers: dict[int, int]


class ParityRestore:
    """Rebuilds shards on this node.

    Args:
        gang_id, node: of this agent.
        dial: returns a stub for the agent on a node.
        address_of: returns the address ("host:port") of the agent on a node; empty: the order names none.
        holders: asks other nodes for shards.
        transport: how pieces travel.
        run_in_thread: runs a function in a thread.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        dial: Dial,
        address_of: Callable[[str], str],
        holders: ShardHolders,
        transport: PieceTransport,
        run_in_thread: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._dial = dial
        self._address_of = address_of
        self._transport = transport
        self._run_in_thread = run_in_thread
        self._holders = holders

    async def rebuild(
        self,
        rank: int,
        version: Version,
        plan: RestorePlan,
        allocate: Callable[[int], Awaitable[SealedMemory]],
        progress: NodeRestore,
    ) -> tuple[tuple[Piece, ...], SealedMemory]:
        """The pieces of a rank's shard, and memory with their bytes, each of them verified.

        Args:
            rank: the rank that wrote the shard.
            version: of the shard.
            plan: names the holders of all parts of the parity, and of all other shards.
            allocate: returns memory of some bytes.
            progress: is told of what is rebuilt.

        Raises:
            FetchFailed: some source is missing. The message says which.
            CorruptShard: sources contradict each other, or the rebuilt bytes are wrong.
            NoMemoryLeft: there is too little memory.
            NoNumpy: nothing can be added without it.
        """
        exclusive_or.load()
        async with AsyncExitStack() as calls:
            offers = await self._ask_for_parity(rank, version, plan, calls)
            pieces = shard_offers.pieces_of_offer(offers[0])
            progress.note_size(size_of(pieces))
            digests = _digests(offers)
            others = [other for other in digests if other != rank]
            asked = (self._ask_for_shard(other, digests[other], version, plan, calls) for other in others)
            sources = self._sources(offers, rank, len(pieces), dict(await asyncio.gather(*asked)))
            memory = await allocate(size_of(pieces))
            try:
                await self._add_all(pieces, sources, memory, progress)
            except BaseException:
                memory.close()
                raise
        log.info("rank %d's shard of %s is rebuilt from the parity of ranks %s", rank, version, sorted(digests))
        return pieces, memory

    # Which sources there are.

    async def _ask_for_parity(
        self, rank: int, version: Version, plan: RestorePlan, calls: AsyncExitStack
    ) -> list[peer_pb2.ShardOffer]:
        """What the holders say of all parts that the rank's shard is in. They agree about everything.

        Raises:
            FetchFailed: some part is missing.
            CorruptShard: the holders disagree.
        """
        named = [source for source in plan.sources if (source.rank, source.tier) == (rank, TIER_PARITY)]
        ranks = list(named[0].parity_ranks)
        asked = {source.node: self._ask_holder(source, version, calls) for source in named}
        offers = await asyncio.gather(*asked.values())
        if {ranks[offer.parity.part] for offer in offers} != set(ranks) - {rank}:
            raise FetchFailed(f"of the parity of ranks {ranks} there are only the parts on {', '.join(asked)}")
        digest = next(source.digest for source in named if source.digest)
        for offer in offers:
            if list(offer.parity.ranks) != ranks or offer.digest.hex() != digest:
                raise CorruptShard(f"{offer.node} holds another parity of ranks {ranks} than the order names")
        return offers

    async def _ask_holder(self, source: RestoreSource, version: Version, calls: AsyncExitStack) -> peer_pb2.ShardOffer:
        node, rank, address = source.node, source.rank, self._address_of(source.node)
        if not address:
            raise FetchFailed(f"the order names no address for {node}")
        request = peer_pb2.FetchRequest(
            gang_id=self._gang_id,
            node=self._node,
            rank=rank,
            version=version.to_wire(),
            parity_ranks=source.parity_ranks,
        )
        call = self._dial(node, address).Fetch(request)
        calls.callback(call.cancel)  # the holder need not keep the part any longer
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                offer = await anext(aiter(call), None)
        except TimeoutError:
            raise FetchFailed(f"{node}: no answer within {OFFER_TIMEOUT_S:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            raise FetchFailed(f"{node}: {error.code().name}: {error.details()}") from error
        if offer is None or (offer.rank, offer.node) != (rank, node) or not offer.parity.part < len(offer.parity.ranks):
            raise FetchFailed(f"{node}: the answer names no parity of rank {rank}")
        return offer

    async def _ask_for_shard(
        self, rank: int, digest: bytes, version: Version, plan: RestorePlan, calls: AsyncExitStack
    ) -> "tuple[int, _Held]":
        """Who holds the shard of another rank, and its pieces."""
        tiers = (TIER_OWN, TIER_BUDDY)
        nodes = [source.node for source in plan.sources if source.rank == rank and source.tier in tiers]
        sources = [Source(node, rank, digest.hex()) for node in dict.fromkeys(nodes)]
        answers = await self._holders.ask(sources, version, calls)
        if not answers.offers:
            reasons = "; ".join(f"{node}: {reason}" for node, reason in answers.failures.items())
            raise FetchFailed(f"rank {rank}'s shard, which the parity combines, is nowhere ({reasons or 'no source'})")
        return rank, _Held([holder for _, _, holder in answers.offers], answers.offers[0][1])

    def _part(self, offer: peer_pb2.ShardOffer) -> "_Held":
        """Who holds a part, and its pieces."""
        pieces = tuple(Piece(p.offset, p.length, p.digest) for p in offer.parity_pieces)
        holder = shard_offers.holder_of_offer(offer, host_of(self._address_of(offer.node)))
        return _Held([Holder(holder.node, holder.host, holder.access, frozenset(range(len(pieces))))], pieces)

    def _sources(
        self, offers: Sequence[peer_pb2.ShardOffer], rank: int, count: int, shards: "dict[int, _Held]"
    ) -> "list[_Source]":
        """Where the pieces come from that are added, if the lost shard of `rank` has `count` pieces.

        Raises:
            CorruptShard: a part has too few pieces.
        """
        added: dict[int, dict[int, int]] = {other: {} for other in shards}
        sources = []
        for offer in offers:
            key = PartKey(shard_offers.version_of_offer(offer), tuple(offer.parity.ranks), offer.parity.part)
            positions = {key.number(rank, position): position for position in range(key.share(rank, count))}
            part = self._part(offer)
            if len(part.pieces) < len(positions):
                raise CorruptShard(f"{offer.node}'s part has {len(part.pieces)} pieces and needs {len(positions)}")
            sources.append(_source(part, positions))
            for other in key.combined:
                if other != rank:
                    added[other].update({n: key.number(other, position) for n, position in positions.items()})
        return sources + [_source(shards[other], numbers) for other, numbers in added.items()]

    # The bytes.

    async def _add_all(
        self, pieces: Sequence[Piece], sources: Sequence[_Source], memory: SealedMemory, progress: NodeRestore
    ) -> None:
        """Rebuild all pieces, some windows at the same time."""
        windows = iter(range(0, len(pieces), WINDOW_PIECES))
        failures: list[BaseException] = []

        async def work() -> None:
            staging = [SealedMemory("muster-staging", WINDOW_PIECES * PIECE_BYTES, sparse=True) for _ in sources]
            try:
                for first in windows:
                    if failures:
                        return
                    window = range(first, min(first + WINDOW_PIECES, len(pieces)))
                    await self._rebuild_window(window, pieces, sources, staging, memory)
                    progress.note_fetched(size_of(pieces[window.start : window.stop]), sources[0].holders[0].node)
            except (FetchFailed, CorruptShard) as error:
                failures.append(error)
            finally:
                for one in staging:
                    one.close()

        await _all_of(work() for _ in range(WINDOWS_AT_ONCE))
        for failure in failures:
            raise failure

    async def _rebuild_window(
        self,
        window: range,
        pieces: Sequence[Piece],
        sources: Sequence[_Source],
        staging: Sequence[SealedMemory],
        memory: SealedMemory,
    ) -> None:
        wanted = [[source.numbers[n] for n in window if n in source.numbers] for source in sources]
        fetches = (
            self._transport.fetch(source.holders, source.places, numbers, staged_in)
            for source, numbers, staged_in in zip(sources, wanted, staging, strict=True)
            if numbers
        )
        await _all_of(fetches)
        views = [one.view for one in staging]

        def add() -> None:
            for n in window:
                piece = pieces[n]
                target, first = memory.view[piece.offset : piece.offset + piece.length], True
                for data in _staged_pieces(n, sources, views):
                    part = data[: piece.length]
                    if first:
                        target[: len(part)] = part
                        target[len(part) :] = bytes(piece.length - len(part))
                    else:
                        exclusive_or.add(target[: len(part)], part)
                    first = False
            verify_pieces(memory, pieces, window)

        await asyncio.shield(asyncio.ensure_future(self._run_in_thread(add)))


def _source(held: _Held, numbers: dict[int, int]) -> _Source:
    """What is added where. Pieces that a shorter shard lacks count as zeros."""
    places, used = list(held.pieces), {}
    for lost, number in numbers.items():
        if number < len(places):
            places[number] = places[number]._replace(offset=lost % WINDOW_PIECES * PIECE_BYTES)
            used[lost] = number
    return _Source(held.holders, places, used)


def _digests(offers: Sequence[peer_pb2.ShardOffer]) -> dict[int, bytes]:
    """For each rank of a parity: the digest of its shard.

    Raises:
        CorruptShard: the holders have combined different shards.
    """
    found: dict[int, bytes] = {}
    for offer in offers:
        for rank, digest in zip(offer.parity.ranks, offer.parity_digests, strict=True):
            if digest and found.setdefault(rank, digest) != digest:
                raise CorruptShard(f"{offer.node} has combined another shard of rank {rank} than {offers[0].node}")
    return found


def _staged_pieces(number: int, sources: Sequence[_Source], views: Sequence[memoryview]) -> Iterator[memoryview]:
    """What is added to a lost piece: the bytes of each source that has such a piece."""
    for source, view in zip(sources, views, strict=True):
        if number in source.numbers:
            place = source.places[source.numbers[number]]
            yield view[place.offset : place.offset + place.length]


async def _all_of(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all at the same time. If one fails, the others are ended, and its error is raised when they have."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
