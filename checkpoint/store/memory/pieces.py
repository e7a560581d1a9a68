"""Pieces of a shard and their digests (XXH3-128).

A shard is divided at fixed offsets: every 4 MiB, and at the three borders that its footer names. Shards of equal layout
therefore have comparable pieces.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import xxhash

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.layout import PIECE_BYTES, Footer, read_footer
from muster.checkpoint.format.replica_agreement import ReplicaDigest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory


class Piece(NamedTuple):
    """A range of a shard's bytes and its XXH3-128 digest (16 bytes)."""

    offset: int
    length: int
    digest: bytes


def piece_ranges(size: int, borders: Iterable[int]) -> list[tuple[int, int]]:
    """(offset, length) of every piece of a shard of `size` bytes. No piece lies across one of the `borders`."""
    edges = sorted({0, size, *(b for b in borders if 0 < b < size)})
    return [
        (start, min(PIECE_BYTES, end - start))
        for begin, end in pairwise(edges)
        for start in range(begin, end, PIECE_BYTES)
    ]


def digest_of(data: memoryview) -> bytes:
    """The XXH3-128 digest of some bytes: 16 bytes."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def digest_pieces(shard: memoryview) -> tuple[Piece, ...]:
    """Divide a filled slot into pieces and digest every piece.

    Raises:
        CorruptShard: the bytes aren't a shard.
    """
    footer = read_footer(shard)
    return tuple(
        Piece(offset, length, digest_of(shard[offset : offset + length]))
        for offset, length in piece_ranges(
            len(shard), (footer.compared_bytes, footer.objects_offset, footer.header_offset)
        )
    )


def shard_digest(pieces: Sequence[Piece]) -> bytes:
    """The digest of a whole shard: XXH3-128 over the digests of its pieces."""
    return digest_of(memoryview(b"".join(p.digest for p in pieces)))


def replica_digest(pieces: Sequence[Piece], footer: Footer) -> ReplicaDigest:
    """The digest of the part that is compared: XXH3-64 over the digests of its pieces. No byte of the shard is read
    again."""
    compared = [piece.digest for piece in pieces if piece.offset < footer.compared_bytes]
    if not footer.replica_group or not compared:
        return ReplicaDigest()
    return ReplicaDigest(footer.replica_group, xxhash.xxh3_64_intdigest(b"".join(compared)))


def pieces_cover(size: int, pieces: Sequence[Piece]) -> bool:
    """Whether the pieces fill `size` bytes, at least one, without a gap or an overlap. Check this before a peer's
    offsets are used."""
    edge = 0
    for piece in pieces:
        if piece.offset != edge or not 0 < piece.length <= PIECE_BYTES or len(piece.digest) != 16:
            return False
        edge += piece.length
    return edge == size > 0


def size_of(pieces: Sequence[Piece]) -> int:
    """Bytes of the shard that these pieces cover."""
    return sum(piece.length for piece in pieces)


def verify_pieces(memory: SealedMemory, pieces: Sequence[Piece], numbers: Iterable[int]) -> None:
    """Check that the bytes of the numbered pieces in `memory` match their digests.

    Raises:
        CorruptShard: the bytes of a piece do not match.
    """
    for number in numbers:
        piece = pieces[number]
        if digest_of(memory.view[piece.offset : piece.offset + piece.length]) != piece.digest:
            raise CorruptShard(f"piece {number} (offset {piece.offset}, {piece.length} bytes) arrived damaged")
