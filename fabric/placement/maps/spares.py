"""Which nodes are left as spares: some that do not fail together, so that one rack or power feed does not take all.

A spare and a seated node exchange their places if the new spare shares less with the other spares. What is only
preferred must not cost communication; what is required may. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.failure_domains import FailureDomains
from muster.fabric.placement.maps.assignment import Assignment
from muster.fabric.placement.maps.node_classes import NodeClasses
from muster.fabric.placement.node_groups import NodeGroup

MOST_EXCHANGES = 4_000
"""Exchanges whose cost is calculated, for all spares together: each takes up to 40 µs."""

_NONE: Mapping[str, int] = {}


def spread_spares(
    fabric: Fabric,
    groups: Sequence[NodeGroup],
    seats: Sequence[str],
    spares: Sequence[str],
    apart: FailureDomains,
    last_choices: Mapping[str, int] = _NONE,
) -> tuple[str, ...]:
    """The node of each seat, after exchanges with spares.

    Args:
        fabric: has all seats and spares.
        groups: of the seats.
        apart: what spares shall not share, of the same fabric.
        last_choices: nodes that shall rather be spares, those with a higher number before others. Only nodes with the
            same number are exchanged.
    """
    if len(spares) < 2 or not apart.any_shared:
        return tuple(seats)
    return _Exchange(fabric, groups, seats, apart, last_choices).spread(spares)


class _Exchange:
    def __init__(
        self,
        fabric: Fabric,
        groups: Sequence[NodeGroup],
        seats: Sequence[str],
        apart: FailureDomains,
        last_choices: Mapping[str, int],
    ) -> None:
        self._seats = list(seats)
        self._apart = apart
        self._last_choices = last_choices
        self._classes = NodeClasses(fabric, fabric.nodes)
        self._assignment = Assignment(groups, self._classes, [self._classes.of(node) for node in seats])
        self._tries = MOST_EXCHANGES

    def spread(self, spares: Sequence[str]) -> tuple[str, ...]:
        """Exchanges one spare after the other, the first one last. Each exchange lessens what all spares share."""
        left = list(spares)
        for at in reversed(range(len(left))):
            spare, others = left[at], left[:at] + left[at + 1 :]
            best = self._best_seat(spare, others)
            if best is not None:
                self._assignment.change([(best, self._classes.of(spare))])
                left[at], self._seats[best] = self._seats[best], spare
        return tuple(self._seats)

    def _best_seat(self, spare: str, others: Sequence[str]) -> int | None:
        """The seat whose node is the best spare instead; None: there is none that is better. `others`: all other
        spares.
        """
        counted = self._apart.count(others)
        shared = self._apart.shared_with(spare, counted)
        if not shared:
            return None
        number, new = self._last_choices.get(spare, 0), self._classes.of(spare)
        required, within = self._required(spare, others), 1e-9 * self._assignment.cost
        best, found = (shared, 0.0), None
        for seat, node in enumerate(self._seats):
            less = self._apart.shared_with(node, counted)
            if self._last_choices.get(node, 0) != number or less > best[0] or less >= shared or self._tries <= 0:
                continue
            self._tries -= 1
            costs = -self._assignment.gain([(seat, new)])
            pays = costs <= within or self._required(node, others) < required
            if pays and (less, costs) < (best if found is not None else (shared, 0.0)):
                best, found = (less, costs), seat
        return found

    def _required(self, node: str, spares: Sequence[str]) -> int:
        return sum(self._apart.breaks_requirement(node, other) for other in spares)
