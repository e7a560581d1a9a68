"""Packs nests of seats into the domains of the fabric: each into the tightest one that still has room.

Best fit, from the largest nest inwards: a nest goes into the child domain with the least free room that holds it.
A nest that fits in none is taken apart, and its parts fill the child with the most room first. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.placement.maps.node_classes import NodeClasses
from muster.fabric.placement.maps.seat_nests import SeatNest


@dataclass(slots=True, eq=False)
class _Room:
    """A domain with its free nodes."""

    free: int
    """Free nodes in it, those of the rooms inside too."""
    own: list[int]
    """The class of each free node that is attached to it. The last one is taken first."""
    inside: list[_Room]


class Rooms:
    """All nodes of a fabric that may be taken, by domain."""

    def __init__(self, fabric: Fabric, classes: NodeClasses) -> None:
        """The nodes of `classes`. Those with a slow link of their own are taken last."""
        self._fabric = fabric
        attached: dict[int, list[int]] = {}
        for number, members in enumerate(classes.members):
            attached.setdefault(id(fabric.path(members[0])[-1]), []).extend([number] * len(members))
        self._attached = attached
        slow = {number for number, members in enumerate(classes.members) if fabric.node(members[0]).uplink}
        for domain in fabric.root.walk():
            if own := attached.get(id(domain)):
                own.sort(key=_winding_order(domain.grid, classes) if domain.grid else lambda n: (n not in slow, -n))

    def pack(self, nest: SeatNest) -> list[int]:
        """The class of each seat's node. There must be as many nodes as seats, or more."""
        taken = [0] * len(nest.seats)
        _pack(nest, self._room(self._fabric.root), taken)
        return taken

    def _room(self, domain: Domain) -> _Room:
        own = list(self._attached.get(id(domain), ()))
        inside = [room for child in domain.children if (room := self._room(child)).free]
        return _Room(len(own) + sum(room.free for room in inside), own, inside)


def _winding_order(grid: Grid, classes: NodeClasses) -> Callable[[int], int]:
    """The sort key of classes under which the end of the walk through the torus comes first."""
    order = {node: position for position, node in enumerate(winding(grid))}
    return lambda number: -order[classes.members[number][0]]


def winding(grid: Grid) -> list[str]:
    """The nodes of a torus in an order in which each is next to the one before, as far as there are no gaps."""
    order = [0]
    for size in reversed(grid.dimensions):
        # One copy of what is inside for each position; every second copy runs backwards.
        step = len(order)
        order = [at * step + place for at in range(size) for place in (order if at % 2 == 0 else order[::-1])]
    return [grid.places[place] for place in order if grid.places[place]]


def _pack(nest: SeatNest, room: _Room, taken: list[int]) -> None:
    """Takes nodes of `room`, which has enough, for all seats of `nest`."""
    size = len(nest.seats)
    room.free -= size
    if not room.inside:
        for seat in nest.seats:
            taken[seat] = room.own.pop()
        return
    fitting = [inside for inside in room.inside if inside.free >= size]
    if fitting and not (size == 1 and room.own):
        _pack(nest, min(fitting, key=lambda inside: inside.free), taken)
        return
    if size == 1:
        taken[nest.seats[0]] = room.own.pop()
        return
    room.free += size
    _take_apart(nest, room, taken)


def _take_apart(nest: SeatNest, room: _Room, taken: list[int]) -> None:
    """Packs the parts of `nest` into as few rooms inside `room` as possible."""
    current: _Room | None = None
    for part in nest.parts:
        size = len(part.seats)
        if current is None or current.free < size:
            current = max(room.inside, key=lambda inside: inside.free)
        if current.free >= size:
            room.free -= size
            _pack(part, current, taken)
        else:
            _pack(part, room, taken)
