"""Betters an assignment: exchanges of two seats and moves to free nodes, as long as they save time. Pure.

All chance is from a generator with a fixed seed, so that the same input gives the same result. For the same reason the
limits are numbers of tried changes, not seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from muster.fabric.placement.maps.assignment import Assignment, Change

LEAST_GAIN = 1e-9
"""Share of the cost that a change must save: less is rounding."""
SMALL = 64
"""Seats up to which every exchange is tried."""
MOST_SLOW_LINKS = 4
"""A change of two seats changes at most four links of a ring. A group with more slowest links is not mended by one."""

MOST_FREE_CLASSES = 32
"""Classes with free nodes to which each seat may move, those that have seats already first."""
BACK_TO_BEST = 0.3
"""How often the search goes back to the best assignment after a descent that has not found a better one."""


class Budget:
    """How many changes may be tried."""

    def __init__(self, tries: int) -> None:
        """`tries` changes are left."""
        self.left = tries

    def spend(self) -> bool:
        """Whether one more may be tried."""
        self.left -= 1
        return self.left >= 0


def descend(assignment: Assignment, free: list[int], budget: Budget) -> None:
    """Makes changes that save time, until none does or the budget is spent.

    `free`: the number of free nodes of each class. It follows the changes.
    """
    improved = True
    while improved and budget.left > 0:
        improved = False
        for changes in _candidates(assignment, free):
            if not budget.spend():
                return
            if _try(assignment, free, changes):
                improved = True


def _try(assignment: Assignment, free: list[int], changes: Sequence[Change]) -> bool:
    before, all_before = assignment.cost, assignment.all_links
    old = [assignment.seats[seat] for seat, _ in changes]
    reversal = assignment.change(changes)
    no_worse = assignment.cost <= before * (1 + LEAST_GAIN) and assignment.all_links < all_before * (1 - LEAST_GAIN)
    if not no_worse and assignment.cost >= before * (1 - LEAST_GAIN):
        assignment.reverse(reversal)
        return False
    _count(free, [new for _, new in changes], old)
    return True


def _count(free: list[int], taken: Sequence[int], left: Sequence[int]) -> None:
    for number in taken:
        free[number] -= 1
    for number in left:
        free[number] += 1


def _candidates(assignment: Assignment, free: Sequence[int]) -> Iterator[tuple[Change, ...]]:
    """Changes that may save time. Each is checked against the seats of the moment at which it is asked for."""
    if len(assignment.seats) <= SMALL:
        yield from _all_changes(assignment, free)
    else:
        yield from _changes_at_slow_links(assignment, free)


def _all_changes(assignment: Assignment, free: Sequence[int]) -> Iterator[tuple[Change, ...]]:
    seats = assignment.seats
    with_room = [number for number, left in enumerate(free) if left > 0]
    used = set(seats)
    near = sorted(with_room, key=lambda number: number not in used)[:MOST_FREE_CLASSES]
    for one in range(len(seats)):
        for other in range(one):
            if seats[one] != seats[other]:
                yield (one, seats[other]), (other, seats[one])
        for number in near:
            if free[number] > 0 and number != seats[one]:
                yield ((one, number),)


def _changes_at_slow_links(assignment: Assignment, free: Sequence[int]) -> Iterator[tuple[Change, ...]]:
    """For each end of a slowest link: to where the other end is, in exchange for each seat that is there."""
    seats = assignment.seats
    for number, group in enumerate(assignment.groups):
        slowest = assignment.slowest[number]
        slow = [pair for pair, cost in zip(group.links(), assignment.links[number], strict=True) if cost >= slowest]
        if len(slow) > MOST_SLOW_LINKS:
            continue
        for pair in slow:
            for moved, fixed in (pair, pair[::-1]):
                there = seats[fixed]
                if there == seats[moved]:
                    continue
                if free[there] > 0:
                    yield ((moved, there),)
                for other in [seat for seat, at in enumerate(seats) if at == there and seat != fixed]:
                    if seats[other] == there != seats[moved]:
                        yield (moved, there), (other, seats[moved])


def search(assignment: Assignment, free: list[int], tries: int) -> None:
    """Descends. Shakes a small assignment and descends again, until `tries` changes were tried. Keeps the best."""
    budget, chance = Budget(tries), random.Random(0)
    descend(assignment, free, budget)
    if len(assignment.seats) > SMALL:
        return
    best, best_free, best_cost = list(assignment.seats), list(free), assignment.cost
    while budget.left > 0:
        _shake(assignment, free, chance)
        descend(assignment, free, budget)
        if assignment.cost < best_cost * (1 - LEAST_GAIN):
            best, best_free, best_cost = list(assignment.seats), list(free), assignment.cost
        elif chance.random() < BACK_TO_BEST:
            assignment.change(list(enumerate(best)))
            free[:] = best_free
    assignment.change(list(enumerate(best)))
    free[:] = best_free


def _shake(assignment: Assignment, free: list[int], chance: random.Random) -> None:
    """Exchanges two groups of one size, or gives some seats each other's nodes and free nodes."""
    seats, groups = assignment.seats, assignment.groups
    one, other = chance.choice(groups).seats, chance.choice(groups).seats
    if len(one) == len(other) and not set(one) & set(other) and chance.random() < 0.5:
        changes = [*zip(one, [seats[seat] for seat in other], strict=True)]
        assignment.change([*changes, *zip(other, [seats[seat] for seat in one], strict=True)])
        return
    moved = chance.sample(range(len(seats)), chance.randint(1, len(seats)))
    old = [seats[seat] for seat in moved]
    nodes = [*old, *(number for number, left in enumerate(free) for _ in range(min(left, len(moved))))]
    new = chance.sample(nodes, len(moved))
    assignment.change(list(zip(moved, new, strict=True)))
    _count(free, new, old)
