"""How the ranks of one group lie in the fabric: the tiers of links between them. Pure.

The result is what `choice.cheapest` takes. It holds for the part of the group that is largest at each tier, because a
collective waits for its slowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from muster.fabric.cost.hierarchy import Tier, Tiers
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link


@dataclass(frozen=True, slots=True)
class Seats:
    """Which rank has its place on which node.

    Raises:
        ValueError: a number is below 1, or no node is given.
    """

    fabric: Fabric
    nodes: tuple[str, ...]
    """The node of group rank 0, of group rank 1 and so on. Ranks fill node after node."""
    local_ranks: int
    """Ranks of each node."""
    nics: int
    """Network adapters of each node, where the fabric does not know them."""

    def __post_init__(self) -> None:
        if self.local_ranks < 1 or self.nics < 1 or not self.nodes:
            raise ValueError("seats need a node, and 1 or more ranks and network adapters on each")

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.nodes[rank // self.local_ranks]

    def rails_of_rank(self, node: str) -> float:
        """Network adapters for each rank of a node: 1 if each has its own."""
        return (len(self.fabric.node(node).nics) or self.nics) / self.local_ranks


def scattered(ranks: int, seats: Seats) -> Tiers:
    """The tiers of a group of so many ranks if each were on a node of its own, as far from the others as can be."""
    root = seats.fabric.root
    across = Tier(ranks, root.link, seats.rails_of_rank(seats.nodes[0]) / root.oversubscription)
    return (across,)


def slowest_groups(groups: Iterable[Sequence[int]], seats: Seats) -> dict[Tiers, int]:
    """The different ways in which the groups lie in the fabric, each with the number of groups that lie so."""
    ways: dict[tuple[tuple[str, int], ...], int] = Counter(
        tuple(Counter(map(seats.node_of, group)).items()) for group in groups
    )
    found: Counter[Tiers] = Counter()
    for way, number in ways.items():
        counts = dict(way)
        most, node = max((count, name) for name, count in way)
        found[Tier(most, seats.fabric.node(node).gpu_link), *_network(counts, seats)] += number
    return dict(found)


def loosest_level(groups: Iterable[Sequence[int]], seats: Seats) -> Level:
    """The tier that joins all ranks of each group: NODE if each group is in a node."""
    found = Level.NODE
    for first, *others in {tuple(dict.fromkeys(map(seats.node_of, group))) for group in groups}:
        for other in others:
            found = max(found, seats.fabric.level_between(first, other))
    return found


def _network(counts: Mapping[str, int], seats: Seats, depth: int = 0) -> Iterator[Tier]:
    """The tiers between nodes, the innermost first.

    Args:
        counts: ranks of the group on each of its nodes.
        seats: where the ranks are.
        depth: how far below the root all these nodes are in one domain.
    """
    parts = _parts(counts, seats, depth)
    ranks = max(parts, key=lambda part: sum(part.values()))
    domain = seats.fabric.path(next(iter(ranks)))[depth]
    if len(seats.fabric.path(next(iter(ranks)))) > depth + 1:
        yield from _network(ranks, seats, depth + 1)
    if len(parts) < 2:
        return
    most = sum(ranks.values())
    on_nvlink = domain.level <= Level.NVLINK
    rails = most if on_nvlink else most * seats.rails_of_rank(next(iter(ranks)))
    link = _link(domain, [next(iter(part)) for part in parts], seats)
    yield Tier(len(parts), link, rails / domain.oversubscription)


def _parts(counts: Mapping[str, int], seats: Seats, depth: int) -> list[dict[str, int]]:
    """The group's nodes in each child of their domain, and each node that is attached to the domain itself."""
    parts: dict[int | str, dict[str, int]] = {}
    for node, count in counts.items():
        path = seats.fabric.path(node)
        # Domains of one fabric are compared by identity: to compare their sets of nodes takes long.
        part = id(path[depth + 1]) if len(path) > depth + 1 else node
        parts.setdefault(part, {})[node] = count
    return list(parts.values())


def _link(domain: Domain, nodes: Sequence[str], seats: Seats) -> Link:
    """The slowest link between neighbours in a ring over one node of each part.

    In a torus, a message over h hops shares each link with h−1 others.
    """
    slowest = domain.link
    for one, other in (*pairwise(nodes), (nodes[-1], nodes[0])):
        link = seats.fabric.link(one, other)
        if domain.grid:
            link = link.shared_by(domain.grid.hops(one, other))
        slowest = Link(max(slowest.latency, link.latency), min(slowest.bandwidth, link.bandwidth))
    return slowest
