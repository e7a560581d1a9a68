"""The predicted communication time of one step: what a placement is judged by.

For each kind of groups: the time of its slowest group, whose slowest link counts. Flows that leave the same domain
share its way out. If all nodes of the gang in a 4:1 domain send out, each has a quarter of its link. If one in four
does, each has its whole link. The rest of the way out belongs to other jobs, in proportion to their nodes. Kinds
communicate one after the other, so only flows of one kind share. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.preferences import weighed

Way = tuple[tuple[Domain, Domain], ...]
"""Domains that a flow leaves or enters, each with the domain around it."""


def step_seconds(fabric: Fabric, groups: Sequence[NodeGroup], seats: Sequence[str]) -> float:
    """Seconds of communication in one step, with these nodes in the seats. Raises UnknownNode.

    A link outside the level that its group prefers or requires counts for more (preferences.py).
    """
    kinds = dict.fromkeys(group.kind for group in groups)
    return sum(_kind_seconds(fabric, [group for group in groups if group.kind is kind], seats) for kind in kinds)


def _kind_seconds(fabric: Fabric, groups: Sequence[NodeGroup], seats: Sequence[str]) -> float:
    flows = [(group, seats[one], seats[other]) for group in groups for one, other in _flows(group)]
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    sending: Counter[str] = Counter()
    for group, a, b in flows:
        common = fabric.common(a, b)
        leaving.update({id(domain): group.count for domain, _ in _way(fabric, a, common)})
        entering.update({id(domain): group.count for domain, _ in _way(fabric, b, common)})
        sending[a] += group.count
    of_node = max(sending.values())
    inside = Counter(id(domain) for node in seats for domain in fabric.path(node))

    def load(domain: Domain, around: Domain) -> float:
        crossing = max(leaving[id(domain)], entering[id(domain)])
        return crossing * around.oversubscription / (inside[id(domain)] * of_node)

    slowest = 0.0
    for group, a, b in flows:
        common = fabric.common(a, b)
        way = (*_way(fabric, a, common), *_way(fabric, b, common))
        shared = max((load(domain, around) for domain, around in way), default=1.0)
        hops = common.grid.hops(a, b) if common.grid else 1
        link = fabric.link(a, b)
        seconds = group.messages * link.latency + group.size * max(1.0, shared, hops) / link.bandwidth
        slowest = max(slowest, weighed(seconds, fabric, a, b, group.within, group.preferred))
    return slowest


def _flows(group: NodeGroup) -> Iterator[tuple[int, int]]:
    """Sender and receiver. In a ring each seat sends to the next one, and two seats send to each other."""
    yield from group.links()
    if len(group.seats) == 2:
        yield group.seats[1], group.seats[0]


def _way(fabric: Fabric, node: str, common: Domain) -> Way:
    """The domains from `node` up to `common`, without it."""
    path = fabric.path(node)
    at = next(position for position, domain in enumerate(path) if domain is common)
    return tuple((path[inner], path[inner - 1]) for inner in range(at + 1, len(path)))
