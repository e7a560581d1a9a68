"""The predicted communication time of one step: what a placement is judged by.

For each kind of groups: the time of its slowest group, whose slowest link counts. Flows that leave the same domain
share its way out. If all nodes of the gang in a 4:1 domain send out, each has a quarter of its link. If one in four
does, each has its whole link. The rest of the way out belongs to other jobs, in proportion to their nodes. Kinds
communicate one after the other, so only flows of one kind share. The levels in which a job requires or prefers its
groups count more than seconds (`weighed`). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.placement.node_groups import NodeGroup

BROKEN_REQUIREMENT_S = 1e6
"""Seconds that a link outside the required level costs: more than any traffic, so that few links are outside."""
PREFERENCE = 100.0
"""A link outside the preferred level counts as so many: a preference outweighs traffic that is not far heavier."""
Way = tuple[Domain, tuple[tuple[Domain, Domain], ...], tuple[tuple[Domain, Domain], ...]]
"""The smallest domain with both nodes. The domains that a flow leaves, and those that it enters, each with the domain
around it.
"""


def step_seconds(fabric: Fabric, groups: Sequence[NodeGroup], seats: Sequence[str]) -> float:
    """Seconds of communication in one step, with these nodes in the seats. Raises UnknownNode.

    A link outside the level that its group prefers or requires counts for more (`weighed`).
    """
    ways = _Ways(fabric, seats)
    nodes = Counter(id(domain) for node in seats for domain in fabric.path(node))
    kinds: dict[GroupKind, list[NodeGroup]] = {}
    for group in groups:
        kinds.setdefault(group.kind, []).append(group)
    return sum(_kind_seconds(ways, nodes, of_kind) for of_kind in kinds.values())


def _kind_seconds(ways: _Ways, nodes: Mapping[int, int], groups: Sequence[NodeGroup]) -> float:
    """`nodes`: how many nodes of the gang each domain has."""
    flows_on: dict[int, int] = {}
    sending = [0] * len(ways.seats)
    unlike: dict[tuple[object, ...], dict[int, tuple[NodeGroup, int, int]]] = {}
    """By traffic and pair of classes: one flow, because all of them take the same time."""
    classes, number = ways.classes, ways.number
    for group in groups:
        count = group.count
        alike = unlike.setdefault((group.messages, group.size, group.within, group.preferred), {})
        for one, other in _flows(group):
            pair = classes[one] * number + classes[other]
            flows_on[pair] = flows_on.get(pair, 0) + count
            sending[one] += count
            alike[pair] = (group, one, other)
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    for pair, count in flows_on.items():
        _, left, entered = ways.between(pair)
        for domain, _ in left:
            leaving[id(domain)] += count
        for domain, _ in entered:
            entering[id(domain)] += count
    of_node = max(sending)

    def load(domain: Domain, around: Domain) -> float:
        crossing = max(leaving[id(domain)], entering[id(domain)])
        return crossing * around.oversubscription / (nodes[id(domain)] * of_node)

    slowest = 0.0
    for pair, (group, one, other) in (found for alike in unlike.values() for found in alike.items()):
        common, left, entered = ways.between(pair)
        a, b = ways.seats[one], ways.seats[other]
        sharing = max([1.0, *(load(domain, around) for domain, around in (*left, *entered))])
        if common.grid:
            sharing = max(sharing, common.grid.hops(a, b))
        link = ways.fabric.link(a, b)
        seconds = group.messages * link.latency + group.size * sharing / link.bandwidth
        slowest = max(slowest, weighed(seconds, ways.fabric, a, b, group.within, group.preferred))
    return slowest


def _flows(group: NodeGroup) -> Iterator[tuple[int, int]]:
    """Sender and receiver. In a ring each seat sends to the next one, and two seats send to each other."""
    yield from group.links()
    if len(group.seats) == 2:
        yield group.seats[1], group.seats[0]


class _Ways:
    """The ways between the nodes of some seats."""

    def __init__(self, fabric: Fabric, seats: Sequence[str]) -> None:
        self.fabric = fabric
        self.seats = seats
        numbers: dict[object, int] = {}
        self._paths: list[tuple[Domain, ...]] = []
        self._known: dict[int, Way] = {}
        self.classes: list[int] = []
        """For each seat, the class of its node. Nodes of one class have the same way and link to each other node."""
        for node in seats:
            path = fabric.path(node)
            alike = node if path[-1].grid else (id(path[-1]), fabric.node(node).uplink)
            if alike not in numbers:
                numbers[alike] = len(numbers)
                self._paths.append(path)
            self.classes.append(numbers[alike])
        self.number = len(numbers)

    def between(self, pair: int) -> Way:
        """The way from a node of one class to a node of another. The pair (one, other) is one * number + other."""
        if pair not in self._known:
            one, other = divmod(pair, self.number)
            here, there = self._paths[one], self._paths[other]
            shared = sum(1 for a, b in zip(here, there, strict=False) if a is b)
            self._known[pair] = (here[shared - 1], _below(here, shared), _below(there, shared))
        return self._known[pair]


def _below(path: Sequence[Domain], shared: int) -> tuple[tuple[Domain, Domain], ...]:
    return tuple((path[inner], path[inner - 1]) for inner in range(shared, len(path)))


def weighed(seconds: float, fabric: Fabric, a: str, b: str, required: Level, preferred: Level) -> float:
    """What a link between two nodes costs, if its traffic takes `seconds`."""
    if not _together(fabric, a, b, preferred):
        seconds *= PREFERENCE
    return seconds if _together(fabric, a, b, required) else seconds + BROKEN_REQUIREMENT_S


def _together(fabric: Fabric, a: str, b: str, level: Level) -> bool:
    return level is Level.ANY or b in fabric.domain(a, level).nodes
