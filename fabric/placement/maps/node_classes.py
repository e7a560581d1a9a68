"""Nodes that are alike for placement, and what a link between two of them costs.

Nodes are alike if every other node has the same link to them: nodes of one leaf without a slow uplink of their own. A
fabric of 12,500 nodes has some hundred classes, so each pair of classes is asked for once. In a torus, each node is a
class. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.node import natural_order
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.step_time import weighed

Weighing = tuple[float, float, Level, Level]
"""Messages, bytes, required and preferred level of a group: groups that are alike in them cost the same on a link."""


class NodeClasses:
    """The classes of some nodes of a fabric."""

    def __init__(self, fabric: Fabric, nodes: Iterable[str]) -> None:
        """Classes for `nodes`. Raises UnknownNode."""
        self._fabric = fabric
        found: dict[object, list[str]] = {}
        self._of: dict[str, int] = {}
        numbers: dict[object, int] = {}
        self.nodes: Sequence[str] = sorted(set(nodes), key=natural_order)
        """All nodes, in natural order."""
        for node in self.nodes:
            path = fabric.path(node)
            alike = node if path[-1].grid else (id(path[-1]), fabric.node(node).uplink)
            number = numbers.setdefault(alike, len(numbers))
            found.setdefault(alike, []).append(node)
            self._of[node] = number
        self.members: Sequence[Sequence[str]] = tuple(map(tuple, found.values()))
        """The nodes of each class, in natural order. A class is its position here."""
        self._costs: dict[Weighing, LinkCosts] = {}

    def __len__(self) -> int:
        """The number of classes."""
        return len(self.members)

    def of(self, node: str) -> int:
        """The class of a node."""
        return self._of[node]

    def costs(self, group: NodeGroup) -> LinkCosts:
        """The costs of links for a group's traffic. Groups with the same traffic share them."""
        weighing = (group.messages, group.size, group.within, group.preferred)
        if weighing not in self._costs:
            self._costs[weighing] = LinkCosts(self, weighing)
        return self._costs[weighing]

    def link_cost(self, one: int, other: int, weighing: Weighing) -> float:
        """Seconds of a step's traffic between nodes of two classes, while every node sends over the same tier."""
        messages, size, within, preferred = weighing
        a, b = self.members[one][0], self.members[other][-1]  # of one class: two nodes, if it has two
        link = self._fabric.loaded_link(a, b)
        seconds = messages * link.latency + size / link.bandwidth
        return weighed(seconds, self._fabric, a, b, within, preferred)


class LinkCosts(dict[int, float]):
    """Seconds by pair of classes. A pair (one, other) is the number `one * len(classes) + other`."""

    def __init__(self, classes: NodeClasses, weighing: Weighing) -> None:
        """Costs that are calculated when they are asked for."""
        super().__init__()
        self._classes = classes
        self._weighing = weighing

    def __missing__(self, pair: int) -> float:
        """Calculates the cost of a pair, and keeps it."""
        one, other = divmod(pair, len(self._classes))
        cost = self[pair] = self._classes.link_cost(one, other, self._weighing)
        return cost
