"""How a job of pieces fills leaves and blocks. Pure arithmetic on numbers of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def segment_of(nodes: int, spares: int, piece: int, block: int, most: int) -> tuple[int, int] | None:
    """The total number of nodes and the size of each segment, so that all pieces have room in the segments.

    Slurm takes segments of one size only, which divides the number of nodes. As few nodes as possible are added. Then a
    spare in each segment is better than none, and a small segment is better than a large one.

    Args:
        nodes: those that carry ranks, in pieces of `piece` nodes.
        spares: more nodes, anywhere.
        block: nodes of a block: the largest segment.
        most: the largest total.

    Returns:
        None if there is no such number up to `most`.
    """
    if piece > block:
        return None
    pieces = -(-nodes // piece)
    # A multiple of a piece always does.
    last = max(pieces, -(-(nodes + spares) // piece)) * piece
    for total in range(nodes + spares, min(most, last) + 1):
        fitting = [size for size in _divisors(total) if size <= block and total // size * (size // piece) >= pieces]
        if fitting:
            with_spare = [size for size in fitting if total // size * ((size - 1) // piece) >= pieces]
            return total, min(with_spare or fitting)
    return None


def smaller_segments(total: int, piece: int) -> Iterator[int]:
    """The segments that divide `total` and a piece, the largest first: each cuts the pieces in equal parts."""
    yield from (size for size in range(piece // 2, 0, -1) if piece % size == 0 and total % size == 0)


def leaf_count(nodes: int, spares: int, piece: int, leaves: Sequence[int]) -> int | None:
    """The smallest number of leaves that hold all pieces, none of them cut, and the spares.

    Args:
        leaves: the number of nodes of each leaf.

    Returns:
        None if they don't fit into all of them.
    """
    pieces, rest = -(-nodes // piece), spares
    for count, size in enumerate(sorted(leaves, reverse=True), start=1):
        here = min(pieces, size // piece)
        pieces -= here
        rest -= size - here * piece
        if pieces <= 0 and rest <= 0:
            return count
    return None


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)
