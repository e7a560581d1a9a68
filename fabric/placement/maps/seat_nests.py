"""Seats in nests: groups inside groups, so that what is packed together can be taken as one piece.

With an order of kinds, for example tensor before pipeline, the groups of the first kind are the innermost nests.
Those that a group of the next kind connects become one nest, and so on, until one nest has all seats. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.placement.node_groups import NodeGroup


@dataclass(frozen=True, slots=True)
class SeatNest:
    """One seat, or nests that are packed together if possible."""

    seats: tuple[int, ...]
    """All seats in it, in the order in which they are packed."""
    parts: tuple[SeatNest, ...] = ()
    """Empty for a single seat."""


def nested(groups: Sequence[NodeGroup], seats: int, order: Sequence[GroupKind]) -> SeatNest:
    """The nest of all `seats`; the groups of the first kind of `order` are innermost."""
    nests = [SeatNest((seat,)) for seat in range(seats)]
    for kind in order:
        nests = list(_joined(nests, [group for group in groups if group.kind is kind], seats))
    return nests[0] if len(nests) == 1 else _around(nests)


def _joined(nests: Sequence[SeatNest], groups: Sequence[NodeGroup], seats: int) -> Iterator[SeatNest]:
    """The nests, those joined that a group connects."""
    of_seat = [0] * seats
    for number, nest in enumerate(nests):
        for seat in nest.seats:
            of_seat[seat] = number
    above = list(range(len(nests)))

    def top(number: int) -> int:
        while above[number] != number:
            above[number] = above[above[number]]
            number = above[number]
        return number

    for group in groups:
        first = top(of_seat[group.seats[0]])
        for seat in group.seats[1:]:
            above[top(of_seat[seat])] = first
            first = top(first)
    together: dict[int, list[SeatNest]] = {}
    for number, nest in enumerate(nests):
        together.setdefault(top(number), []).append(nest)
    for parts in together.values():
        yield parts[0] if len(parts) == 1 else _around(parts)


def _around(parts: Sequence[SeatNest]) -> SeatNest:
    return SeatNest(tuple(seat for part in parts for seat in part.seats), tuple(parts))
