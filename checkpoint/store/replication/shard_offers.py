"""Offers: shards as messages between agents. An offer describes a shard, and says how its pieces can be fetched."""

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, pieces_cover, shard_digest
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams.transport import Holder, PieceAccess
from muster.v1 import peer_pb2

INLINE_PIECE_BYTES = 128 << 10
"""Pieces of at most this size travel inside the offer. A shard has at most three of them, one before each border."""


def make_offer(
    gang_id: str, node: str, shard: Shard, access: PieceAccess | None = None, *, inline: bool = False
) -> peer_pb2.ShardOffer:
    """Describe a shard: version, size and the digest of every piece.

    Args:
        gang_id, node: the sender.
        shard: the shard to describe.
        access: how its pieces can be fetched; None: they can't.
        inline: put the bytes of small pieces into the offer.

    Raises:
        CorruptShard: the bytes of an inline piece do not match their digest.
    """
    offer = peer_pb2.ShardOffer(
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
    if access is not None:
        offer.access.port, offer.access.token, offer.access.certificate = access.port, access.token, access.certificate
    return offer


def holder_of_offer(offer: peer_pb2.ShardOffer, host: str) -> Holder:
    """Where all pieces of an offer can be fetched. `host`: of the node that has made the offer."""
    access = PieceAccess(offer.access.port, offer.access.token, offer.access.certificate)
    return Holder(offer.node, host, access, frozenset(range(len(offer.pieces))))


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


def _verified_piece(shard: Shard, number: int) -> memoryview:
    data = shard.piece(number)
    if digest_of(data) != shard.pieces[number].digest:
        raise CorruptShard(f"piece {number} of rank {shard.rank}'s shard of {shard.version} has changed in memory")
    return data
