"""Rebuilds the shard of a lost rank: the XOR of its parity and of all other shards that the parity combines.

The holders of the parity say which shards these are, and the digest of each piece of the lost one. The pieces of all
sources come into a small staging memory, verified, and are added in the place of the lost piece (`parity_sum`), which
must match its own digest when it has all of them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import zip_longest
from typing import NamedTuple

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, size_of
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.store.parity.parity_part import PartKey
from muster.checkpoint.store.parity.parity_sum import AddedPieces, ParitySum
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import Dial, host_of
from muster.checkpoint.store.restore.restore_progress import NodeRestore
from muster.checkpoint.store.restore.shard_holders import OFFER_TIMEOUT_S, ShardHolders, Source
from muster.checkpoint.store.streams.transport import FetchFailed, Holder, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN, TIER_PARITY, RestorePlan, RestoreSource
from muster.wording import counted

log = logging.getLogger(__name__)

WINDOW_PIECES = 8
"""Pieces that are fetched from one source at a time: they need 32 MiB of staging memory."""
WINDOWS_AT_ONCE = 4
"""While one is fetched, another one can be added."""
REBUILDS_AT_ONCE = 2
"""Shards that this node rebuilds at the same time. Others wait, so staging memory is 256 MiB at most, however many
ranks a node and a parity have."""


class _Held(NamedTuple):
    """A shard, or a part of a parity, on other nodes."""

    holders: Sequence[Holder]
    pieces: tuple[Piece, ...]


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
        self._rebuilds = asyncio.Semaphore(REBUILDS_AT_ONCE)

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
        async with self._rebuilds, AsyncExitStack() as calls:
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
        asked = {(source.node, source.parity_part): self._ask_holder(source, version, calls) for source in named}
        offers = await asyncio.gather(*asked.values())
        if {ranks[offer.parity.part] for offer in offers} != set(ranks) - {rank}:
            raise FetchFailed(
                f"of the parity of ranks {ranks} there are only the parts on {', '.join(node for node, _ in asked)}"
            )
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
            parity_part=source.parity_part,
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
        part = source.parity_part
        if (
            offer is None
            or (offer.rank, offer.node, offer.parity.part) != (rank, node, part)
            or part >= len(offer.parity.ranks)
        ):
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
    ) -> "list[AddedPieces]":
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
                raise CorruptShard(
                    f"{offer.node}'s part has {counted(len(part.pieces), 'piece')} and needs {len(positions)}"
                )
            sources.append(_source(part, positions))
            for other in key.combined:
                if other != rank:
                    added[other].update({n: key.number(other, position) for n, position in positions.items()})
        return sources + [_source(shards[other], numbers) for other, numbers in added.items()]

    # The bytes.

    async def _add_all(
        self, pieces: Sequence[Piece], sources: Sequence[AddedPieces], memory: SealedMemory, progress: NodeRestore
    ) -> None:
        """Rebuild all pieces. Some windows are fetched and added at the same time."""
        total = ParitySum(pieces, sources, memory)
        windows = iter([window for at_once in zip_longest(*map(_windows, sources)) for window in at_once if window])

        async def work() -> None:
            staging = SealedMemory("muster-staging", WINDOW_PIECES * PIECE_BYTES, sparse=True)
            try:
                for source, lost in windows:
                    wanted = [source.numbers[number] for number in lost]
                    await self._transport.fetch(source.holders, source.places, wanted, staging)
                    done = await self._run_in_thread.to_the_end(total.add, source, lost, staging.view)
                    progress.note_fetched(done, source.holders[0].node)
            finally:
                staging.close()

        await _all_of(work() for _ in range(WINDOWS_AT_ONCE))


def _windows(source: AddedPieces) -> "Iterator[tuple[AddedPieces, list[int]]]":
    """What is fetched from a source at a time: the numbers of the lost pieces that it is added to."""
    lost = list(source.numbers)
    for first in range(0, len(lost), WINDOW_PIECES):
        yield source, lost[first : first + WINDOW_PIECES]


def _source(held: _Held, numbers: dict[int, int]) -> AddedPieces:
    """What is added where. Pieces that a shorter shard lacks count as zeros."""
    used = {lost: number for lost, number in sorted(numbers.items()) if number < len(held.pieces)}
    places = list(held.pieces)
    for place, number in enumerate(used.values()):
        places[number] = places[number]._replace(offset=place % WINDOW_PIECES * PIECE_BYTES)
    return AddedPieces(held.holders, places, used)


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


async def _all_of(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all at the same time. If one fails, the others are ended, and its error is raised when they have."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
