"""Shards as messages between agents: an offer that describes a shard, and its pieces in messages of 512 KiB."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, pieces_cover, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.v1 import peer_pb2

MESSAGE_BYTES = 512 << 10
"""Bytes of shard data in one message: far below gRPC's limit of 4 MiB a message."""

INLINE_PIECE_BYTES = 128 << 10
"""Pieces of at most this size travel inside the offer. A shard has at most three of them, one before each border."""


def make_offer(gang_id: str, node: str, shard: Shard, *, inline: bool = False) -> peer_pb2.ShardOffer:
    """Describe a shard: version, size and the digest of every piece.

    Args:
        gang_id, node: the sender.
        shard: the shard to describe.
        inline: put the bytes of small pieces into the offer.

    Raises:
        CorruptShard: the bytes of an inline piece do not match their digest.
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
                data=bytes(_verified_piece(shard, n)) if inline and piece.length <= INLINE_PIECE_BYTES else b"",
            )
            for n, piece in enumerate(shard.pieces)
        ],
    )


def version_of_offer(offer: peer_pb2.ShardOffer) -> Version:
    """The version of an offer."""
    return Version.from_wire(offer.version)


def inline_pieces(offer: peer_pb2.ShardOffer) -> dict[int, bytes]:
    """The bytes inside an offer by the piece's number. They are not verified yet."""
    return {n: piece.data for n, piece in enumerate(offer.pieces) if piece.data}


def pieces_of_offer(offer: peer_pb2.ShardOffer) -> tuple[Piece, ...]:
    """The pieces of an offer.

    Raises:
        CorruptShard: the pieces do not cover the shard, or do not give its digest.
    """
    pieces = tuple(Piece(p.offset, p.length, p.digest) for p in offer.pieces)
    inline_data_is_whole = all(len(p.data) in (0, p.length) for p in offer.pieces)
    if not inline_data_is_whole or not pieces_cover(offer.bytes, pieces) or shard_digest(pieces) != offer.digest:
        raise CorruptShard(f"the offer of rank {offer.rank} from {offer.node} contradicts itself")
    return pieces


async def shard_messages(
    offer: peer_pb2.ShardOffer, shard: Shard, numbers: Iterable[int]
) -> AsyncIterator[peer_pb2.ShardData]:
    """The offer, then the numbered pieces of `shard`. Each piece is verified just before it is sent.

    Raises:
        CorruptShard: the bytes of a piece do not match their digest.
    """
    yield peer_pb2.ShardData(offer=offer)
    for number in numbers:
        piece, data = shard.pieces[number], _verified_piece(shard, number)
        for start in range(0, piece.length, MESSAGE_BYTES):
            chunk = bytes(data[start : start + MESSAGE_BYTES])
            yield peer_pb2.ShardData(offset=piece.offset + start, data=chunk)


def _verified_piece(shard: Shard, number: int) -> memoryview:
    data = shard.piece(number)
    if digest_of(data) != shard.pieces[number].digest:
        raise CorruptShard(f"piece {number} of rank {shard.rank}'s shard of {shard.version} has changed in memory")
    return data


async def receive_pieces(
    stream: AsyncIterable[peer_pb2.ShardData], memory: SealedMemory, pieces: Sequence[Piece]
) -> list[int]:
    """Write all data of a stream into `memory`.

    Returns:
        Numbers of the pieces that arrived whole. They are not verified yet.

    Raises:
        CorruptShard: some data lies in no piece of the shard.
    """
    received_bytes: dict[int, int] = {}
    ranges = [(p.offset, p.offset + p.length) for p in pieces]
    current = 0
    async for message in stream:
        start, end = message.offset, message.offset + len(message.data)
        if not message.data:
            continue
        if not ranges[current][0] <= start < ranges[current][1]:
            current = next((n for n, (first, last) in enumerate(ranges) if first <= start < last), len(ranges))
        if current == len(ranges) or end > ranges[current][1]:
            raise CorruptShard(f"bytes {start} to {end} are in no piece of the shard")
        memory.view[start:end] = message.data
        received_bytes[current] = received_bytes.get(current, 0) + len(message.data)
    return [n for n, count in received_bytes.items() if count == pieces[n].length]
