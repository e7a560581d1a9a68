"""Fills the seats of lost nodes: with the spare that costs least, and with a second move where that pays. Pure.

A spare far from the lost node's groups makes each step slower. Two things may help. A seated node that is nearer takes
the empty seat, and the spare its seat. Or the ranks of a node that communicates with the empty seat move as well, so
that both seats are on spares near each other. Either moves the state of one more node. It is done only if the steps
until the next loss save more time than this transfer takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, permutations

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.node import natural_order
from muster.fabric.placement.maps.assignment import Assignment, Change
from muster.fabric.placement.maps.node_classes import NodeClasses
from muster.fabric.placement.node_groups import NodeGroup, without_preferences

MOST_LOSSES = 4
"""Seats that are empty at once, above which no second move is looked for: the gang waits for its restart."""
MOST_SECOND_MOVES = 200
"""Second moves of each of the two kinds that are tried for one empty seat: 10 ms in all."""
STEPS_UNTIL_NEXT_LOSS = 1_000.0
"""Within so many steps a second move must pay, if the caller knows nothing better: some hours of a large job."""

LEAST_LOSS = 1e-6
"""Share by which a loss must have raised the cost. Else no second move is looked for."""

_NONE: Mapping[str, int] = {}

Move = tuple[tuple[int, str], ...]
"""Seats with their new nodes."""
_NO_MOVE: Move = ()


@dataclass(frozen=True, slots=True)
class MovePrice:
    """What a second move costs, and how long it pays.

    Raises:
        ValueError: a number is negative, or not finite.
    """

    state_size: float
    """Bytes of the state of one node's ranks."""
    steps: float = STEPS_UNTIL_NEXT_LOSS
    """Steps until the next loss is expected."""
    most_saved: float = math.inf
    """Seconds that a step can save at most, for example the whole step as it was measured."""
    unready: frozenset[str] = frozenset()
    """Spares that no second move may use: a healthy node's ranks are not moved to a doubtful one."""

    def __post_init__(self) -> None:
        """Refuses what is no size and no number of steps."""
        if not (0 <= self.state_size < float("inf") and 0 <= self.steps < float("inf")):
            raise ValueError(f"a move of {self.state_size:g} bytes for {self.steps:g} steps: both must be 0 or more")


@dataclass(frozen=True, slots=True)
class Refill:
    """The seats after a loss."""

    seats: tuple[str, ...]
    """The node of each seat."""
    moved: tuple[int, ...]
    """Seats that have another node though the one before is usable: their state moves, too."""
    cost: float
    """`RankMap.cost` of these seats."""


def refill(
    fabric: Fabric,
    groups: Sequence[NodeGroup],
    seats: Sequence[str],
    usable: Iterable[str],
    price: MovePrice | None = None,
    last_choices: Mapping[str, int] = _NONE,
) -> Refill:
    """The seats of the next generation. A usable node keeps its seat, but for second moves.

    Args:
        fabric: has all seated and all usable nodes.
        groups: of the same number of seats.
        seats: the nodes of the generation before, lost ones too.
        usable: nodes that may carry ranks. Those without a seat are the spares.
        price: of second moves; None: there are none.
        last_choices: spares that take a seat only if no other spare is left, those with a higher number last.

    Raises:
        ValueError: there are fewer spares than empty seats.
        UnknownNode: the fabric lacks a node.
    """
    present = set(usable)
    empty = [seat for seat, node in enumerate(seats) if node not in present]
    spares = sorted(present.difference(seats), key=natural_order)
    if len(spares) < len(empty):
        raise ValueError(f"{len(empty)} empty seats need as many spares, and there are {len(spares)}")
    filled = _Filled(fabric, groups, seats, spares, last_choices)
    before = filled.assignment.cost
    for seat in empty:
        filled.take_best_spare(seat)
    filled.exchange(empty)
    for seat in empty:
        if price and len(empty) <= MOST_LOSSES and filled.assignment.cost > before * (1 + LEAST_LOSS):
            filled.move_second(seat, set(empty), fabric, price)
    moved = [seat for seat, node in enumerate(filled.nodes) if node != seats[seat] and seats[seat] in present]
    return Refill(tuple(filled.nodes), tuple(moved), filled.assignment.cost)


class _Filled:
    """Seats while they are filled."""

    def __init__(
        self,
        fabric: Fabric,
        groups: Sequence[NodeGroup],
        seats: Sequence[str],
        spares: list[str],
        last_choices: Mapping[str, int],
    ) -> None:
        self.nodes = list(seats)
        self._spares = spares
        self._last_choices = last_choices
        self._classes = NodeClasses(fabric, [*seats, *spares])
        numbers = [self._classes.of(node) for node in seats]
        self.assignment = Assignment(groups, self._classes, numbers)
        self._groups = groups
        self._known_plain: Assignment | None = None

    @property
    def _plain(self) -> Assignment:
        """The same seats with predicted seconds, whatever the job prefers: a transfer takes seconds, too."""
        if self._known_plain is None:
            plain = without_preferences(self._groups)
            same = plain == tuple(self._groups)
            self._known_plain = self.assignment if same else Assignment(plain, self._classes, self.assignment.seats)
        return self._known_plain

    def take_best_spare(self, seat: int) -> None:
        """Gives `seat` the spare that costs least. Spares of one class cost the same."""
        worth: dict[int, float] = {}
        for spare in self._spares:
            number = self._classes.of(spare)
            if number not in worth:
                worth[number] = self.assignment.gain([(seat, number)])
        chosen = min(
            self._spares,
            key=lambda spare: (self._last_choices.get(spare, 0), -round(worth[self._classes.of(spare)], 9)),
        )
        self._spares.remove(chosen)
        self._seat([(seat, chosen)])

    def exchange(self, empty: Sequence[int]) -> None:
        """Exchanges the new nodes of two empty seats as long as that saves time."""
        better = len(empty) > 1
        while better:
            better = False
            for at, one in enumerate(empty):
                for other in empty[:at]:
                    changes = [(one, self.nodes[other]), (other, self.nodes[one])]
                    if self.assignment.gain(self._as_classes(changes)) > 1e-9 * self.assignment.cost:
                        self._seat(changes)
                        better = True

    def move_second(self, seat: int, empty: set[int], fabric: Fabric, price: MovePrice) -> None:
        """Makes the second move that pays best, if one pays."""
        best, chosen, plain = 0.0, _NO_MOVE, self._plain
        kinds = (self._to_other_spares(seat, empty, price.unready), self._into_the_seat(seat, empty, price.unready))
        for move in chain.from_iterable(islice(moves, MOST_SECOND_MOVES) for moves in kinds):
            changes = self._as_classes(move)
            saved = min(plain.gain(changes), price.most_saved) * price.steps
            if saved <= best or (plain is not self.assignment and self.assignment.gain(changes) < 0):
                continue
            moved_seat, new_node = move[1]  # the state of this seat's ranks moves there
            paid = fabric.link(self.nodes[moved_seat], new_node).time(price.state_size)
            if saved - paid > best:
                best, chosen = saved - paid, move
        left = {self.nodes[at] for at, _ in chosen} - {node for _, node in chosen}
        taken = {node for _, node in chosen}
        self._seat(chosen)
        self._spares = sorted((set(self._spares) | left) - taken, key=natural_order)

    def _into_the_seat(self, seat: int, empty: set[int], unready: frozenset[str]) -> Iterator[Move]:
        """A seated node takes `seat`, and the spare there takes its seat."""
        if self.nodes[seat] in unready:
            return
        for other in self._nearer(seat, empty):
            yield (seat, self.nodes[other]), (other, self.nodes[seat])

    def _to_other_spares(self, seat: int, empty: set[int], unready: frozenset[str]) -> Iterator[Move]:
        """A node that communicates with `seat` moves to a spare, and another spare takes `seat`: one move for each two
        classes of spares.
        """
        partners = [other for other in self.assignment.neighbours(seat) if other not in empty]
        ready = (spare for spare in self._spares if not self._last_choices.get(spare))
        spares = [node for node in (self.nodes[seat], *ready) if node not in unready]
        tried: set[tuple[int, int, int]] = set()
        for one, other in permutations(spares, 2):
            for partner in partners:
                alike = (partner, self._classes.of(one), self._classes.of(other))
                if alike not in tried:
                    tried.add(alike)
                    yield (seat, one), (partner, other)

    def _nearer(self, seat: int, empty: set[int]) -> list[int]:
        """Seats whose nodes would save time in `seat`, the best first. What their own seats lose is not counted."""
        worth: dict[int, float] = {}
        for number in set(self.assignment.seats):
            worth[number] = self.assignment.gain([(seat, number)])
        near = [other for other, number in enumerate(self.assignment.seats) if worth[number] > 0 and other not in empty]
        return sorted(near, key=lambda other: -worth[self.assignment.seats[other]])

    def _as_classes(self, changes: Iterable[tuple[int, str]]) -> list[Change]:
        return [(seat, self._classes.of(node)) for seat, node in changes]

    def _seat(self, changes: Sequence[tuple[int, str]]) -> None:
        self.assignment.change(self._as_classes(changes))
        if self._known_plain is not None and self._known_plain is not self.assignment:
            self._known_plain.change(self._as_classes(changes))
        for seat, node in changes:
            self.nodes[seat] = node
