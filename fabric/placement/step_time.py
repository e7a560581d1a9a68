"""The predicted communication time of one step: what a placement is judged by.

For each kind of groups: the time of its slowest group, whose slowest link counts. Flows that leave the same domain
share its way out. If all nodes of the gang in a 4:1 domain send out, each has a quarter of its link. If one in four
does, each has its whole link. The rest of the way out belongs to other jobs, in proportion to their nodes. Kinds
communicate one after the other, so only flows of one kind share. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.preferences import weighed

Way = tuple[Domain, tuple[tuple[Domain, Domain], ...], tuple[tuple[Domain, Domain], ...]]
"""The smallest domain with both nodes. The domains that a flow leaves, and those that it enters, each with the domain
around it.
"""


def step_seconds(fabric: Fabric, groups: Sequence[NodeGroup], seats: Sequence[str]) -> float:
    """Seconds of communication in one step, with these nodes in the seats. Raises UnknownNode.

    A link outside the level that its group prefers or requires counts for more (preferences.py).
    """
    ways = _Ways(fabric)
    nodes = Counter(id(domain) for node in seats for domain in fabric.path(node))
    kinds = dict.fromkeys(group.kind for group in groups)
    return sum(_kind_seconds(ways, nodes, [group for group in groups if group.kind is kind], seats) for kind in kinds)


def _kind_seconds(ways: _Ways, nodes: Mapping[int, int], groups: Sequence[NodeGroup], seats: Sequence[str]) -> float:
    """`nodes`: how many nodes of the gang each domain has."""
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    sending: Counter[str] = Counter()
    flows = []
    for group in groups:
        for one, other in _flows(group):
            way = ways.between(seats[one], seats[other])
            flows.append((group, seats[one], seats[other], way))
            for domain, _ in way[1]:
                leaving[id(domain)] += group.count
            for domain, _ in way[2]:
                entering[id(domain)] += group.count
            sending[seats[one]] += group.count
    of_node = max(sending.values())

    def load(domain: Domain, around: Domain) -> float:
        crossing = max(leaving[id(domain)], entering[id(domain)])
        return crossing * around.oversubscription / (nodes[id(domain)] * of_node)

    slowest = 0.0
    for group, a, b, (common, left, entered) in flows:
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
    """The ways between nodes. Nodes of one leaf have the same ways to all others."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._known: dict[tuple[int, int], Way] = {}

    def between(self, a: str, b: str) -> Way:
        """The way from node `a` to node `b`."""
        here, there = self.fabric.path(a), self.fabric.path(b)
        key = (id(here[-1]), id(there[-1]))
        if key not in self._known:
            shared = sum(1 for one, other in zip(here, there, strict=False) if one is other)
            self._known[key] = (here[shared - 1], _below(here, shared), _below(there, shared))
        return self._known[key]


def _below(path: Sequence[Domain], shared: int) -> tuple[tuple[Domain, Domain], ...]:
    return tuple((path[inner], path[inner - 1]) for inner in range(shared, len(path)))
