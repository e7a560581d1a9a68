"""The holder of a parity's part: takes in the shards of other nodes, and gives the part to who rebuilds a shard.

A shard's pieces come into a small staging memory, verified, and are added to the part from there. Each piece of each
rank is added once, however often its shard is offered.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, shard_digest, size_of, verify_pieces
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.parity import exclusive_or
from muster.checkpoint.store.parity.exclusive_or import NoNumpy
from muster.checkpoint.store.parity.parity_part import ParityPart, PartDropped, PartKey, staged
from muster.checkpoint.store.parity.parity_store import ParityStore
from muster.checkpoint.store.replication import shard_offers
from muster.checkpoint.store.replication.dial import host_of
from muster.checkpoint.store.streams.transport import FetchFailed, PieceAccess, PieceTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2

WINDOW_PIECES = 8
"""Pieces that are fetched at a time, and then added: 32 MiB of staging memory for each shard that comes."""
SHARDS_AT_ONCE = 4
"""Shards that come at the same time. Others wait: more would need more staging memory and bring nothing sooner."""
FETCH_TIMEOUT_S = 3600.0
"""Seconds for which a part is kept for one who fetches it. Quiet streams are ended long before."""
MOST_RANKS = 1024
"""Ranks of a parity, at most."""


class ParityReceiver:
    """Takes in shards, and gives parts.

    Args:
        gang_id, node: of this agent. Offers of other gangs are refused.
        parity_store: the parts of this node.
        transport: how pieces travel.
        address_of: returns the address ("host:port") of the agent on a node; empty: it is unknown.
        stale_reason: returns why a version is refused; empty if it is not.
        run_in_thread: runs a function in a thread.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        parity_store: ParityStore,
        transport: PieceTransport,
        address_of: Callable[[str], str],
        stale_reason: Callable[[Version], str],
        run_in_thread: WorkerThreads,
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._parity_store = parity_store
        self._transport = transport
        self._address_of = address_of
        self._stale_reason = stale_reason
        self._run_in_thread = run_in_thread
        self._transfers = asyncio.Semaphore(SHARDS_AT_ONCE)
        self._staging: list[SealedMemory] = []
        """Staging memory that is not in use. Its pages stay: the kernel takes longer to find them than to fill them."""

    async def offer(self, offer: peer_pb2.ShardOffer) -> peer_pb2.ShardStored:
        """Add a shard to a part. All its pieces are in the part when this returns without a refusal."""
        version = shard_offers.version_of_offer(offer)
        if offer.gang_id != self._gang_id:
            return peer_pb2.ShardStored(refused=f"this agent belongs to gang {self._gang_id}, not {offer.gang_id}")
        if refused := self._stale_reason(version):
            return peer_pb2.ShardStored(refused=refused)
        try:
            await self._add_shard(offer, _key_of(offer), shard_offers.pieces_of_offer(offer))
        except (CorruptShard, NoMemoryLeft, FetchFailed, NoNumpy, PartDropped) as error:
            return peer_pb2.ShardStored(refused=str(error))
        if refused := self._stale_reason(version):
            self._parity_store.drop(lambda dropped: dropped == version)
        return peer_pb2.ShardStored(refused=refused)

    async def _add_shard(self, offer: peer_pb2.ShardOffer, key: PartKey, pieces: tuple[Piece, ...]) -> None:
        exclusive_or.load()
        count = key.share(offer.rank, len(pieces))
        incoming = size_of([pieces[key.number(offer.rank, position)] for position in range(count)])
        part = self._parity_store.part(key, count, incoming)
        part.begin_rank(offer.rank, pieces)
        async with part.turns[offer.rank]:
            if part.shard is not None:
                return
            if count > part.capacity:
                await self._run_in_thread.to_the_end(
                    part.replace_memory, *self._parity_store.allocate(key, count, incoming)
                )
            if missing := part.missing(offer.rank):
                async with self._transfers:
                    await self._add_pieces(offer, part, pieces, missing)
            if await self._run_in_thread.to_the_end(part.try_complete):
                self._parity_store.note_whole(part)

    async def _add_pieces(
        self, offer: peer_pb2.ShardOffer, part: ParityPart, pieces: tuple[Piece, ...], missing: Sequence[int]
    ) -> None:
        """Fetch and add the pieces at some positions, a window after the other."""
        key, inline = part.key, shard_offers.inline_pieces(offer)
        places, count = staged(pieces, WINDOW_PIECES, key.stride), key.share(offer.rank, len(pieces))
        staging = self._staging.pop() if self._staging else self._new_staging()
        try:
            for first in range(0, count, WINDOW_PIECES):
                window = {p: key.number(offer.rank, p) for p in missing if first <= p < first + WINDOW_PIECES}
                given = [n for n in window.values() if n in inline]
                for n in given:
                    staging.view[places[n].offset : places[n].offset + places[n].length] = inline[n]
                verify_pieces(staging, places, given)
                if fetched := [n for n in window.values() if n not in inline]:
                    await self._fetch(offer, places, fetched, staging)
                come = [(p, staging.view[places[n].offset :][: places[n].length]) for p, n in window.items()]
                await self._run_in_thread.to_the_end(part.add, offer.rank, come)
        finally:
            self._staging.append(staging)

    def _new_staging(self) -> SealedMemory:
        return SealedMemory(f"muster-{self._gang_id}-staging", WINDOW_PIECES * PIECE_BYTES, sparse=True)

    def close(self) -> None:
        """Free the staging memory."""
        while self._staging:
            self._staging.pop().close()

    async def _fetch(
        self, offer: peer_pb2.ShardOffer, places: list[Piece], numbers: list[int], staging: SealedMemory
    ) -> None:
        address = self._address_of(offer.node)
        if not address or not offer.HasField("access"):
            raise FetchFailed(f"the offer of {offer.node} names no port, or no order names this node as a member")
        holder = shard_offers.holder_of_offer(offer, host_of(address))
        await self._transport.fetch([holder], places, numbers, staging)

    async def fetch(
        self, request: peer_pb2.FetchRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncGenerator[peer_pb2.ShardOffer, None]:
        """Offer the part that a rank's shard is in, and let the caller fetch it until it ends this call."""
        version = Version.from_wire(request.version)
        part = self._parity_store.find(PartKey(version, tuple(request.parity_ranks), request.parity_part))
        if (
            request.gang_id != self._gang_id
            or part is None
            or part.shard is None
            or request.rank not in part.key.combined
        ):
            reason = f"{self._node} holds no parity with rank {request.rank} at {version} of gang {request.gang_id}"
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
            return
        with part.shard.held() as shard, self._transport.grant(shard) as grant:
            try:
                yield self._describe(part, request.rank, grant.access)
                await asyncio.sleep(FETCH_TIMEOUT_S)  # the caller ends the call
            finally:
                if grant.changed:
                    self._parity_store.quarantine(part, grant.changed)

    def _describe(self, part: ParityPart, rank: int, access: PieceAccess) -> peer_pb2.ShardOffer:
        pieces = part.pieces_of(rank)
        return peer_pb2.ShardOffer(
            gang_id=self._gang_id,
            node=self._node,
            rank=rank,
            version=part.key.version.to_wire(),
            bytes=size_of(pieces),
            digest=shard_digest(pieces),
            pieces=_to_wire(pieces),
            access=peer_pb2.PieceAccess(port=access.port, token=access.token, certificate=access.certificate),
            parity=part.key.to_wire(),
            parity_pieces=_to_wire(part.shard.pieces if part.shard is not None else ()),
            parity_digests=part.digests(),
        )


def _key_of(offer: peer_pb2.ShardOffer) -> PartKey:
    """The part that an offer is for.

    Raises:
        CorruptShard: there can be no such part.
    """
    key = PartKey(shard_offers.version_of_offer(offer), tuple(offer.parity.ranks), offer.parity.part)
    if not key.part < len(set(key.ranks)) == len(key.ranks) <= MOST_RANKS or offer.rank not in key.combined:
        raise CorruptShard(f"the offer of rank {offer.rank} from {offer.node} names an impossible parity")
    return key


def _to_wire(pieces: Sequence[Piece]) -> list[peer_pb2.Piece]:
    return [peer_pb2.Piece(offset=piece.offset, length=piece.length, digest=piece.digest) for piece in pieces]
