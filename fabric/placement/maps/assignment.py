"""Seats with their nodes' classes, and the predicted cost, which a change of some seats corrects in microseconds.

Groups of one kind work at the same time, and a step waits for the slowest of them. A group takes the time of its
slowest link. So the cost of a kind is the time of its slowest group. The mean of its groups is added: the more groups
cross a tier, the more they share it. `step_time` counts the flows instead, which takes a thousand times longer. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from muster.fabric.placement.maps.group_layout import layout_of
from muster.fabric.placement.maps.node_classes import LinkCosts, NodeClasses
from muster.fabric.placement.node_groups import NodeGroup

Change = tuple[int, int]
"""A seat, and the class of its new node."""
Before = tuple[float, float, list[float]]
Reversal = tuple[Before, list[Change], list[tuple[list[float], int, float]], list[tuple[int, float]]]


class Assignment:
    """A class of nodes for each seat."""

    def __init__(self, groups: Sequence[NodeGroup], classes: NodeClasses, seats: Sequence[int]) -> None:
        """`seats`: the class of each seat's node. All seats of `groups` are among them."""
        self.groups = groups
        self.seats = list(seats)
        self._count = len(classes)
        layout = layout_of(groups, len(self.seats))
        self._touching, self._kind, self._share = layout.touching, layout.kind, layout.share
        self._costs: list[LinkCosts] = [classes.costs(group) for group in groups]
        count, classes_of = self._count, self.seats
        self.links: list[list[float]] = [
            [costs[classes_of[one] * count + classes_of[other]] for one, other in pairs]
            for costs, pairs in zip(self._costs, layout.pairs, strict=True)
        ]
        """Seconds of each link of each group."""
        self.slowest: list[float] = [max(links) for links in self.links]
        """Seconds of each group: those of its slowest link."""
        self._times_of_kind = [Counter(self.slowest[number] for number in members) for members in layout.of_kind]
        """For each kind: how many of its groups take each time. Many groups take the same few."""
        self._slowest_of_kind = [max(times) for times in self._times_of_kind]
        mean = sum(share * slowest for share, slowest in zip(self._share, self.slowest, strict=True))
        self.cost = sum(self._slowest_of_kind) + mean
        """Seconds: for each kind, its slowest group and the mean of its groups."""
        self.all_links = sum(map(sum, self.links))
        """Seconds of all links, the fast ones too. Where `cost` is the same, a lower one is nearer to a better cost."""

    def neighbours(self, seat: int) -> list[int]:
        """The seats with a link to `seat`, those of the slowest groups first."""
        touching = sorted(self._touching[seat], key=lambda link: -self.slowest[link[0]])
        return list(dict.fromkeys(other for _, _, *ends in touching for other in ends if other != seat))

    def change(self, changes: Iterable[Change]) -> Reversal:
        """Gives seats other nodes and corrects `cost`. Returns what `reverse` needs."""
        seats, count = self.seats, self._count
        before, old_seats = (self.cost, self.all_links, list(self._slowest_of_kind)), []
        touched = set()
        for seat, new in changes:
            old_seats.append((seat, seats[seat]))
            seats[seat] = new
            touched.update(self._touching[seat])
        old_links, groups = [], set()
        for number, at, one, other in touched:
            links = self.links[number]
            new_cost = self._costs[number][seats[one] * count + seats[other]]
            if new_cost != links[at]:
                old_links.append((links, at, links[at]))
                self.all_links += new_cost - links[at]
                links[at] = new_cost
                groups.add(number)
        old_slowest = []
        for number in groups:
            slowest = max(self.links[number])
            if slowest != self.slowest[number]:
                old_slowest.append((number, self.slowest[number]))
                self._set_slowest(number, slowest)
        return before, old_seats, old_links, old_slowest

    def _set_slowest(self, number: int, slowest: float) -> None:
        """Corrects the cost for a new time of one group."""
        kind, old = self._kind[number], self.slowest[number]
        self.slowest[number] = slowest
        times = self._times_of_kind[kind]
        _exchange(times, old, slowest)
        self.cost += self._share[number] * (slowest - old)
        of_kind = self._slowest_of_kind[kind]
        if slowest > of_kind:
            self._slowest_of_kind[kind] = slowest
        elif old == of_kind and old not in times:
            self._slowest_of_kind[kind] = max(times)
        self.cost += self._slowest_of_kind[kind] - of_kind

    def reverse(self, reversal: Reversal) -> None:
        """Takes the newest change back."""
        (self.cost, self.all_links, self._slowest_of_kind), old_seats, old_links, old_slowest = reversal
        for seat, old in old_seats:
            self.seats[seat] = old
        for links, at, seconds in old_links:
            links[at] = seconds
        for number, seconds in old_slowest:
            _exchange(self._times_of_kind[self._kind[number]], self.slowest[number], seconds)
            self.slowest[number] = seconds

    def gain(self, changes: Iterable[Change]) -> float:
        """Seconds that the changes would save; negative if they cost. Nothing changes."""
        before = self.cost
        reversal = self.change(changes)
        saved = before - self.cost
        self.reverse(reversal)
        return saved


def _exchange(times: Counter[float], old: float, new: float) -> None:
    """One group takes the time `new` instead of `old`."""
    times[new] += 1
    if times[old] == 1:
        del times[old]
    else:
        times[old] -= 1
