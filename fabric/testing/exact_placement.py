"""The exact optimum of a placement, for small gangs: branch and bound. For tests and for `make bench-placement` only.

The objective is that of `fabric/placement/maps/assignment.py`, calculated a second time and from the fabric itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node
from muster.fabric.placement.maps.group_layout import MEAN_SHARE
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.step_time import weighed
from muster.fabric.placement.weights import Weight

ROUNDING = 1e-9
_SAMPLES = 20
"""Random orders of which a mean is taken."""


@dataclass(frozen=True)
class Problem:
    """A gang to be placed."""

    fabric: Fabric
    groups: tuple[NodeGroup, ...]
    seats: int

    def cost(self, nodes: Sequence[str]) -> float:
        """Seconds of one step with these nodes in the seats."""
        return self.total(
            [
                max(self.link_cost(group, nodes[one], nodes[other]) for one, other in group.links())
                for group in self.groups
            ]
        )

    def total(self, slowest: Sequence[float]) -> float:
        """The cost, if these are the seconds of each group."""
        found = 0.0
        for kind in {group.kind for group in self.groups}:
            times = [
                (seconds, group.count)
                for seconds, group in zip(slowest, self.groups, strict=True)
                if group.kind is kind
            ]
            mean = sum(seconds * number for seconds, number in times) / sum(number for _, number in times)
            found += max(seconds for seconds, _ in times) + MEAN_SHARE * mean
        return found

    def link_cost(self, group: NodeGroup, a: str, b: str) -> float:
        """Seconds of the traffic of `group` between two nodes."""
        link = self.fabric.loaded_link(a, b)
        seconds = group.messages * link.latency + group.size / link.bandwidth
        return weighed(seconds, self.fabric, a, b, group.within, group.preferred)

    def random_cost(self, chance: random.Random) -> float:
        """The mean cost of random orders."""
        nodes = sorted(self.fabric.nodes)
        return sum(self.cost(chance.sample(nodes, self.seats)) for _ in range(_SAMPLES)) / _SAMPLES


def least_cost(problem: Problem, known: float) -> float:
    """The least cost of all placements. `known` is the cost of some placement, which makes the search short."""
    return min(known, _Search(problem, known).best)


class _Search:
    """Fills seat after seat, and gives up where the links that are fixed cost as much as the best placement.

    A group of n seats with one of them on node a reaches n − 1 other nodes. Its slowest link therefore costs at least
    what the way to the (n − 1)-th nearest node costs, where a way costs what its slowest link costs.
    """

    def __init__(self, problem: Problem, known: float) -> None:
        self.best = known * (1 + ROUNDING)
        self._problem = problem
        self._kinds = [sorted(nodes) for nodes in _alike(problem.fabric)]
        self._order = _seats_by_traffic(problem)
        position = {seat: at for at, seat in enumerate(self._order)}
        self._links: list[list[tuple[int, int]]] = [[] for _ in self._order]
        """For each seat in the order of filling: the groups with a link to an earlier one, and which one."""
        for number, group in enumerate(problem.groups):
            for one, other in group.links():
                first, second = sorted((position[one], position[other]))
                self._links[second].append((number, first))
        self._groups = [[n for n, group in enumerate(problem.groups) if seat in group.seats] for seat in self._order]
        self._costs = [_matrix(problem, group) for group in problem.groups]
        self._reach = [
            _reach(costs, len(group.seats)) for costs, group in zip(self._costs, problem.groups, strict=True)
        ]
        cheapest = [min(reach.values()) for reach in self._reach]
        self._fill([], [0] * len(self._kinds), cheapest)

    def _fill(self, nodes: list[str], used: list[int], slowest: list[float]) -> None:
        if self._problem.total(slowest) >= self.best * (1 - ROUNDING):
            return
        if len(nodes) == self._problem.seats:
            self.best = self._problem.total(slowest)
            return
        choices = []
        for kind, members in enumerate(self._kinds):
            if used[kind] < len(members):
                changed = self._with(nodes, members[used[kind]], slowest)
                choices.append((self._problem.total(changed), kind, changed))
        for _, kind, changed in sorted(choices, key=lambda choice: choice[:2]):
            used[kind] += 1
            self._fill([*nodes, self._kinds[kind][used[kind] - 1]], used, changed)
            used[kind] -= 1

    def _with(self, nodes: list[str], node: str, slowest: list[float]) -> list[float]:
        changed = list(slowest)
        for group in self._groups[len(nodes)]:
            changed[group] = max(changed[group], self._reach[group][node])
        for group, earlier in self._links[len(nodes)]:
            changed[group] = max(changed[group], self._costs[group][nodes[earlier], node])
        return changed


def _seats_by_traffic(problem: Problem) -> list[int]:
    """Each seat after those with which it communicates most."""
    order, left = [0], set(range(1, problem.seats))
    while left:
        traffic = dict.fromkeys(left, 0.0)
        for group in problem.groups:
            share = group.size * len(set(group.seats) - left) / len(group.seats)
            for seat in left.intersection(group.seats):
                traffic[seat] += share
        order.append(max(left, key=lambda seat: (traffic[seat], -seat)))
        left.remove(order[-1])
    return order


def _matrix(problem: Problem, group: NodeGroup) -> dict[tuple[str, str], float]:
    nodes = problem.fabric.nodes
    return {(a, b): problem.link_cost(group, a, b) for a in nodes for b in nodes if a != b}


def _reach(costs: Mapping[tuple[str, str], float], seats: int) -> dict[str, float]:
    """For each node: what the slowest link of a group costs at least, if the group has the node."""
    nodes = sorted({node for node, _ in costs})
    ways = dict(costs) | {(node, node): 0.0 for node in nodes}
    for middle in nodes:
        for a in nodes:
            for b in nodes:
                ways[a, b] = min(ways[a, b], max(ways[a, middle], ways[middle, b]))
    return {a: sorted(ways[a, b] for b in nodes)[seats - 1] for a in nodes}


def _alike(fabric: Fabric) -> list[list[str]]:
    """Nodes that may be exchanged without any effect."""
    found: dict[object, list[str]] = {}
    for node in fabric.nodes:
        domain = fabric.path(node)[-1]
        found.setdefault(node if domain.grid else (id(domain), fabric.node(node).uplink), []).append(node)
    return list(found.values())


def random_problem(chance: random.Random) -> Problem:
    """Three tiers (leaves, pods, the whole), 8 to 12 nodes, uneven; links, axes and traffic by chance."""
    numbers = count()
    bandwidths = sorted((10 ** chance.uniform(9, 11) for _ in range(3)), reverse=True)
    latencies = sorted(10 ** chance.uniform(-6, -4.5) for _ in range(3))
    tiers = [Link(latency, bandwidth) for latency, bandwidth in zip(latencies, bandwidths, strict=True)]
    leaves: list[Domain] = []
    total = chance.randint(8, 10)
    while (left := total - sum(len(leaf.nodes) for leaf in leaves)) > 0:
        nodes = frozenset(f"n{next(numbers)}" for _ in range(min(left, chance.randint(1, 5))))
        leaves.append(Domain(Level.LEAF, nodes, tiers[0], uplink=_perhaps_slow(tiers[1], chance)))
    pods: list[Domain] = []
    while leaves:
        inside, leaves = leaves[: (size := chance.randint(1, 3))], leaves[size:]
        joined = frozenset().union(*(leaf.nodes for leaf in inside))
        pods.append(Domain(Level.POD, joined, tiers[1], tuple(inside), chance.choice([1.0, 2.0])))
    every = frozenset().union(*(pod.nodes for pod in pods))
    details = [Node(node, uplink=link) for node in sorted(every) if (link := _perhaps_slow(tiers[0], chance))]
    fabric = Fabric(Domain(Level.ANY, every, tiers[2], tuple(pods), chance.choice([1.0, 2.0, 4.0])), tuple(details))
    seats = total - chance.randint(0, 2)
    return Problem(fabric, _random_groups(seats, chance), seats)


def _perhaps_slow(link: Link, chance: random.Random) -> Link | None:
    return Link(link.latency, link.bandwidth / 4) if chance.random() < 0.1 else None


def _random_groups(seats: int, chance: random.Random) -> tuple[NodeGroup, ...]:
    local_ranks = chance.choice([1, 2, 4])
    world = seats * local_ranks
    tensor = _divisor(world, chance)
    context = _divisor(world // tensor, chance)
    pipeline = _divisor(world // (tensor * context), chance)
    data = world // (tensor * context * pipeline)
    axes = Axes(tensor, context, _divisor(data * context, chance), data, pipeline)
    weights: Mapping[GroupKind, Weight] = {
        kind: Weight(10 ** chance.uniform(0, 4), 10 ** chance.uniform(6, 9)) for kind in GroupKind
    }
    levels = {kind: chance.choice([Level.LEAF, Level.POD]) for kind in GroupKind if chance.random() < 0.1}
    return node_groups(axes, local_ranks, weights, preferred=levels)


def _divisor(number: int, chance: random.Random) -> int:
    return chance.choice([divisor for divisor in range(1, number + 1) if number % divisor == 0])
