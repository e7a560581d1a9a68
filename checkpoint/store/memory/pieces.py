"""Pieces of a shard and their digests (XXH3-128).

Cut at fixed offsets, so that equal layouts give comparable pieces: every 4 MiB, and at the borders in the footer.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import xxhash

from muster.checkpoint.format.layout import PIECE_BYTES, read_footer
from muster.checkpoint.store.memory.shards import Piece, Shard


def piece_ranges(size: int, borders: Iterable[int]) -> list[tuple[int, int]]:
    """(offset, length) of every piece of a shard of `size` bytes, with cuts at `borders`."""
    edges = sorted({0, size, *(b for b in borders if 0 < b < size)})
    return [
        (start, min(PIECE_BYTES, end - start))
        for begin, end in pairwise(edges)
        for start in range(begin, end, PIECE_BYTES)
    ]


def digest_of(data: memoryview) -> bytes:
    """XXH3-128 of some bytes: 16 bytes."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def digest_pieces(shard: memoryview) -> tuple[Piece, ...]:
    """Cut a filled slot and digest every piece.

    Raises:
        CorruptShard: the bytes aren't a shard.
    """
    footer = read_footer(shard)
    return tuple(
        Piece(offset, length, digest_of(shard[offset : offset + length]))
        for offset, length in piece_ranges(len(shard), (footer.cut, footer.header))
    )


def shard_digest(pieces: Sequence[Piece]) -> bytes:
    """The digest of a whole shard: XXH3-128 over its pieces' digests."""
    return digest_of(memoryview(b"".join(p.digest for p in pieces)))


def pieces_cover(size: int, pieces: Sequence[Piece]) -> bool:
    """Whether the pieces lie side by side and fill `size` bytes: asked before a peer's words touch memory."""
    edge = 0
    for piece in pieces:
        if piece.offset != edge or not 0 < piece.length <= PIECE_BYTES or len(piece.digest) != 16:
            return False
        edge += piece.length
    return edge == size


def bad_pieces(shard: Shard) -> list[int]:
    """Numbers of the pieces whose bytes don't give their digest."""
    return [n for n, piece in enumerate(shard.pieces) if digest_of(shard.piece(n)) != piece.digest]
