"""Which node carries which seat, for a start on nodes of any number: the map of least predicted communication.

Packing gives some maps, the natural order of names another one, and search betters the one that costs least
(`assignment`). The predicted time (`step_time`), in which flows share the ways out of domains, decides between them.
For a small gang only maps that cost nearly as little as the best one take part, so that the cost is within 2 % of the
optimum. For a large one all do, so that the result is never worse than the order of names. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.node import natural_order
from muster.fabric.placement.maps.assignment import Assignment
from muster.fabric.placement.maps.node_classes import NodeClasses
from muster.fabric.placement.maps.packing import Rooms
from muster.fabric.placement.maps.search import SMALL, search
from muster.fabric.placement.maps.seat_nests import nested
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.step_time import step_seconds

MOST_ORDERS = 24
"""Orders of kinds that are tried: all orders of four kinds."""
MOST_ORDERS_OF_LARGE_GANGS = 6
TRIES_PER_SEAT = 500
"""Changes that are tried, for gangs of up to SMALL seats. Each takes about 10 µs (measured)."""
TRIES_OF_LARGE_GANGS = 5_000
"""For more seats. Each change takes up to 40 µs there, and packing has left little to better."""
NEARLY_AS_GOOD = 1.01
"""Of the least cost that was found."""

_NONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class RankMap:
    """The node of each seat, by group rank."""

    seats: tuple[str, ...]
    spares: tuple[str, ...]
    """The nodes without a seat, in natural order."""


def place(
    fabric: Fabric,
    groups: Sequence[NodeGroup],
    nodes: Iterable[str],
    seats: int,
    last_choices: Mapping[str, int] = _NONE,
) -> RankMap:
    """The map for `seats` seats on `nodes`. The nodes that are left are spares.

    Args:
        fabric: has all of `nodes`.
        groups: what `node_groups.node_groups` returns.
        nodes: usable nodes, as many as seats or more.
        seats: nodes that carry ranks.
        last_choices: nodes that get a seat only if there are too few others, those with a higher number last.

    Raises:
        ValueError: there are fewer nodes than seats.
        UnknownNode: the fabric lacks a node.
    """
    given = set(nodes)
    if len(given) < seats:
        raise ValueError(f"{seats} seats need {seats} nodes, and {len(given)} are given")
    found = _place(fabric, groups, _first_choices(fabric, given, seats, last_choices), seats)
    return RankMap(found, tuple(sorted(given.difference(found), key=natural_order)))


def _first_choices(fabric: Fabric, nodes: Iterable[str], seats: int, last_choices: Mapping[str, int]) -> list[str]:
    """The nodes without a number, if they are as many as seats or more. Else as many as seats: those with the lowest
    numbers, of equal ones those with the most others on their leaf."""
    ordered = sorted(nodes, key=lambda node: (last_choices.get(node, 0), natural_order(node)))
    highest = last_choices.get(ordered[seats - 1], 0)
    first = [node for node in ordered if last_choices.get(node, 0) < (highest or 1)]
    if not highest:
        return first
    beside = Counter(fabric.domain(node, Level.LEAF).nodes for node in first)
    last = [node for node in ordered if last_choices.get(node, 0) == highest]
    last.sort(key=lambda node: -beside[fabric.domain(node, Level.LEAF).nodes])  # stable
    return [*first, *last[: seats - len(first)]]


def _place(fabric: Fabric, groups: Sequence[NodeGroup], nodes: Sequence[str], seats: int) -> tuple[str, ...]:
    """The node of each seat."""
    classes = NodeClasses(fabric, nodes)
    in_order = tuple(classes.nodes[:seats])
    if len(classes) == 1 or not groups:
        return in_order
    in_natural_order = Assignment(groups, classes, [classes.of(node) for node in in_order])
    known = [in_natural_order, *_packings(fabric, groups, classes, seats)]
    best = min(known, key=lambda assignment: assignment.cost)
    searched = Assignment(groups, classes, best.seats)
    free = [len(members) for members in classes.members]
    for number in best.seats:
        free[number] -= 1
    search(searched, free, TRIES_PER_SEAT * seats if seats <= SMALL else TRIES_OF_LARGE_GANGS)
    most = searched.cost * NEARLY_AS_GOOD if seats <= SMALL else float("inf")
    maps = [_named(assignment, classes) for assignment in (searched, *known) if assignment.cost <= most]
    return min(maps, key=lambda found: step_seconds(fabric, groups, found))


def _packings(fabric: Fabric, groups: Sequence[NodeGroup], classes: NodeClasses, seats: int) -> list[Assignment]:
    """The assignments that packing gives, for several orders of kinds: those with the heaviest kind innermost first."""
    sizes: dict[GroupKind, float] = {}
    for group in groups:
        sizes[group.kind] = max(sizes.get(group.kind, 0.0), group.size)
    by_weight = sorted(sizes, key=lambda kind: (-sizes[kind], kind))
    most = MOST_ORDERS if seats <= SMALL else MOST_ORDERS_OF_LARGE_GANGS
    rooms = Rooms(fabric, classes)
    found: dict[tuple[int, ...], Assignment] = {}
    for order in islice(permutations(by_weight), most):
        packed = tuple(rooms.pack(nested(groups, seats, order)))
        if packed not in found:
            found[packed] = Assignment(groups, classes, packed)
    return list(found.values())


def _named(assignment: Assignment, classes: NodeClasses) -> tuple[str, ...]:
    """The node of each seat: within a class, seats take nodes in natural order."""
    left = [list(reversed(members)) for members in classes.members]
    return tuple(left[number].pop() for number in assignment.seats)
