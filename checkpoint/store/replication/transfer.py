"""Shards on the wire: offers, and pieces cut into messages of 512 KiB."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import digest_of, pieces_cover, shard_digest
from muster.checkpoint.store.memory.shards import Piece, Shard
from muster.checkpoint.store.memory.slots import SealedMemory
from muster.v1 import peer_pb2

MESSAGE_BYTES = 512 << 10

INLINE_PIECE_BYTES = 128 << 10
"""A piece of no more bytes goes along with the offer. A shard has three such at most, one before each border."""


def make_offer(gang_id: str, node: str, shard: Shard, *, short: bool = False) -> peer_pb2.ShardOffer:
    """Describe a shard: its version, its size and the digest of every piece; with `short`, the bytes of short ones too.

    Raises:
        CorruptShard: a short piece is not what its digest says.
    """
    return peer_pb2.ShardOffer(
        gang_id=gang_id,
        node=node,
        rank=shard.rank,
        version=shard.version.to_wire(),
        bytes=shard.bytes,
        digest=shard.digest,
        pieces=[
            peer_pb2.Piece(
                offset=piece.offset,
                length=piece.length,
                digest=piece.digest,
                data=bytes(_verified(shard, n)) if short and piece.length <= INLINE_PIECE_BYTES else b"",
            )
            for n, piece in enumerate(shard.pieces)
        ],
    )


def inline_pieces(offer: peer_pb2.ShardOffer) -> dict[int, bytes]:
    """The bytes of pieces that came along with an offer, by the piece's number; not verified yet."""
    return {n: piece.data for n, piece in enumerate(offer.pieces) if piece.data}


def pieces_of_offer(offer: peer_pb2.ShardOffer) -> tuple[Piece, ...]:
    """The pieces of an offer.

    Raises:
        CorruptShard: they don't cover the shard, or don't give its digest.
    """
    pieces = tuple(Piece(p.offset, p.length, p.digest) for p in offer.pieces)
    whole = all(len(p.data) in (0, p.length) for p in offer.pieces)
    if not whole or not pieces_cover(offer.bytes, pieces) or shard_digest(pieces) != offer.digest:
        raise CorruptShard(f"the offer of rank {offer.rank} from {offer.node} contradicts itself")
    return pieces


async def shard_messages(
    offer: peer_pb2.ShardOffer, shard: Shard, numbers: Iterable[int]
) -> AsyncIterator[peer_pb2.ShardData]:
    """The offer, then the numbered pieces of `shard`, each verified just before it leaves.

    Raises:
        CorruptShard: a piece is not what its digest says.
    """
    yield peer_pb2.ShardData(offer=offer)
    for n in numbers:
        piece, data = shard.pieces[n], _verified(shard, n)
        for start in range(0, piece.length, MESSAGE_BYTES):
            part = bytes(data[start : start + MESSAGE_BYTES])
            yield peer_pb2.ShardData(offset=piece.offset + start, data=part)


def _verified(shard: Shard, number: int) -> memoryview:
    data = shard.piece(number)
    if digest_of(data) != shard.pieces[number].digest:
        raise CorruptShard(f"piece {number} of rank {shard.rank}'s shard of {shard.version} has changed in memory")
    return data


async def receive_pieces(
    stream: AsyncIterable[peer_pb2.ShardData], memory: SealedMemory, pieces: Sequence[Piece]
) -> list[int]:
    """Write what comes into `memory`.

    Returns:
        Numbers of the pieces that came whole. They are not verified yet.

    Raises:
        CorruptShard: data lies outside the shard.
    """
    came: dict[int, int] = {}
    edges = [(p.offset, p.offset + p.length) for p in pieces]
    current = 0
    async for message in stream:
        start, end = message.offset, message.offset + len(message.data)
        if not message.data:
            continue
        if not edges[current][0] <= start < edges[current][1]:
            current = next((n for n, (a, b) in enumerate(edges) if a <= start < b), len(edges))
        if current == len(edges) or end > edges[current][1]:
            raise CorruptShard(f"bytes {start} to {end} are in no piece of the shard")
        memory.view[start:end] = message.data
        came[current] = came.get(current, 0) + len(message.data)
    return [n for n, count in came.items() if count == pieces[n].length]


def version_of_offer(offer: peer_pb2.ShardOffer) -> Version:
    """The version of an offer."""
    return Version.from_wire(offer.version)
