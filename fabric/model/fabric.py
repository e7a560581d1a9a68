"""The fabric of a cluster: its domains and its nodes, and the questions that placement and cost ask.

`Fabric.domain` says in which domain a node is packed at a level. Network tiers that a fabric lacks hold everybody: on a
flat network, all nodes are on the same leaf. NVLink is the opposite: without a multi-node domain, each node is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from muster.fabric.model.domain import Domain
from muster.fabric.model.errors import FabricError, UnknownNode
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link, in_series
from muster.fabric.model.node import FailureDomain, Node, natural_order
from muster.wording import counted

PARTS_KEPT = 32
"""Parts of one fabric that are kept: those of the gangs that start or recover at the same time."""


@dataclass(frozen=True)
class Fabric:
    """A fabric. Two fabrics are equal if they have equal nodes, links and domains, whatever the domains' names are.

    Raises:
        FabricError: a node is described twice, or is not in the tree.
    """

    root: Domain
    """The whole network. Its level is ANY, also if it is a single switch."""
    details: tuple[Node, ...] = ()
    """What is known of nodes. A node of the tree may be missing here."""

    def __post_init__(self) -> None:
        """Refuses details that don't fit the tree."""
        names = [node.name for node in self.details]
        if len(set(names)) != len(names):
            raise FabricError("a node is described twice")
        if strange := set(names) - self.root.nodes:
            raise FabricError(f"nodes that are not in the network are described: {', '.join(sorted(strange)[:5])}")
        if self.root.level is not Level.ANY:
            raise FabricError(f"the root of a fabric is {self.root.level.word}: it must be any")

    def __hash__(self) -> int:
        """The hash, calculated once: a fabric may have 12,500 nodes."""
        return self._hash

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes."""
        return self.root.nodes

    def node(self, name: str) -> Node:
        """What is known of the node `name`. Raises UnknownNode."""
        self.path(name)
        return self._details.get(name) or Node(name)

    def path(self, node: str) -> tuple[Domain, ...]:
        """All domains that hold `node`, the root first. Raises UnknownNode."""
        try:
            return self._paths[node]
        except KeyError:
            others = counted(len(self.nodes), "other")
            raise UnknownNode(f"the fabric has no node {node[:80]!r}; it has {others}") from None

    def domain(self, node: str, level: Level) -> Domain:
        """The domain in which `node` is packed at `level`: two nodes are together at a level if their domains are the
        same.

        LEAF and POD: the smallest domain of that level or of a looser one. ANY: the whole fabric. NVLINK: the node's
        NVLink domain; the node alone if it has none. NODE and ACCELERATOR: the node alone. Raises UnknownNode.
        """
        path = self.path(node)
        if level is Level.ANY:
            return self.root
        if level >= Level.LEAF:
            return next(domain for domain in reversed(path) if domain.level >= level)
        if level is Level.NVLINK and (found := [domain for domain in path if domain.level is Level.NVLINK]):
            return found[0]
        return Domain(Level.NODE, frozenset((node,)), self.node(node).gpu_link, name=node)

    def domains(self, level: Level) -> tuple[Domain, ...]:
        """All domains of `level` (NVLINK to ANY), in the order of the tree. Empty if the fabric lacks the tier."""
        return tuple(domain for domain in self.root.walk() if domain.level is level)

    def level_between(self, a: str, b: str) -> Level:
        """The tightest tier that joins the nodes `a` and `b`: NODE if they are one node. Raises UnknownNode."""
        if a == b:
            self.path(a)
            return Level.NODE
        return self.common(a, b).level

    def common(self, a: str, b: str) -> Domain:
        """The smallest domain of the tree that holds both nodes. Raises UnknownNode."""
        found = self.root
        for one, other in zip(self.path(a), self.path(b), strict=False):
            if one is not other:
                break
            found = one
        return found

    def link(self, a: str, b: str) -> Link:
        """What one flow between GPUs of `a` and `b` has while nobody else sends. Raises UnknownNode.

        Between two GPUs of one node if `a` is `b`. In a ring or a torus, each hop adds its latency.
        """
        if a == b:
            return self.node(a).gpu_link
        common = self.common(a, b)
        link = common.link
        if common.grid:
            link = Link(link.latency * common.grid.hops(a, b), link.bandwidth)
        slowed = (*self._uplinks_below(a, common), *self._uplinks_below(b, common))
        return in_series((link, *slowed)) if slowed else link

    def loaded_link(self, a: str, b: str) -> Link:
        """What one flow between `a` and `b` has while every node sends over the same tier. Raises UnknownNode.

        The oversubscription of the tier divides the bandwidth. In a ring or a torus, flows over h hops share each link
        with h - 1 others.
        """
        if a == b:
            return self.link(a, b)
        common = self.common(a, b)
        flows = common.oversubscription * (common.grid.hops(a, b) if common.grid else 1)
        return self.link(a, b).shared_by(flows)

    def shared_failure_domains(self, a: str, b: str) -> frozenset[FailureDomain]:
        """What takes both nodes down at once. What nobody knows is not shared. Raises UnknownNode."""
        one, other = self.node(a), self.node(b)
        leaf = self.domain(a, Level.LEAF)
        shared = {
            FailureDomain.NODE: a == b,
            FailureDomain.LEAF: a == b or (leaf.level is Level.LEAF and b in leaf.nodes),
            FailureDomain.RACK: bool(one.rack) and one.rack == other.rack,
            FailureDomain.POWER: bool(one.power_feed) and one.power_feed == other.power_feed,
        }
        return frozenset(kind for kind, both in shared.items() if both)

    def part(self, nodes: Iterable[str]) -> Fabric:
        """The fabric of `nodes` alone. Those that this fabric lacks are attached to the root: nothing is known of them.

        Domains keep their names, links and positions. The newest parts are kept: each start of a gang asks for its own.
        """
        wanted = frozenset(nodes)
        if wanted == self.nodes:
            return self
        if (found := self._parts.get(wanted)) is None:
            root = replace(_part(self.root, wanted), nodes=wanted)
            found = Fabric(root, tuple(node for node in self.details if node.name in wanted))
            while len(self._parts) >= PARTS_KEPT:
                del self._parts[next(iter(self._parts))]
            self._parts[wanted] = found
        return found

    def leaf_name(self, node: str) -> str:
        """The name of the leaf of `node`; empty if the fabric has no leaves there, or lacks the node."""
        return self.name_at(node, Level.LEAF)

    def name_at(self, node: str, level: Level) -> str:
        """The name of the domain of `node` at `level`; empty if the fabric has none there, or lacks the node."""
        path = self._paths.get(node, ())
        return next((domain.name for domain in reversed(path) if domain.level is level), "")

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The position of each node along the tree: nodes of one domain are together, in natural order."""
        found: list[str] = []

        def descend(domain: Domain) -> None:
            for child in domain.children:
                descend(child)
            found.extend(sorted(domain.own_nodes, key=natural_order))

        descend(self.root)
        return {node: at for at, node in enumerate(found)}

    def _uplinks_below(self, node: str, common: Domain) -> Iterable[Link]:
        """The links from `node` up to `common` that differ from their tier's. NVLink passes none of them."""
        if common.level < Level.LEAF:
            return
        own = self._details.get(node)
        if own and own.uplink:
            yield own.uplink
        for domain in reversed(self.path(node)):
            if domain is common:
                return
            if domain.uplink:
                yield domain.uplink

    @cached_property
    def _parts(self) -> dict[frozenset[str], Fabric]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash((self.root, self.details))

    @cached_property
    def _details(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.details}

    @cached_property
    def _paths(self) -> Mapping[str, tuple[Domain, ...]]:
        paths: dict[str, tuple[Domain, ...]] = {}

        def descend(domain: Domain, above: tuple[Domain, ...]) -> None:
            path = (*above, domain)
            paths.update(dict.fromkeys(domain.own_nodes, path))
            for child in domain.children:
                descend(child, path)

        descend(self.root, ())
        return paths


def _part(domain: Domain, wanted: frozenset[str]) -> Domain:
    """`domain` with the nodes of `wanted` alone, without domains that have none of them."""
    nodes = domain.nodes & wanted
    if len(nodes) == len(domain.nodes):
        return domain
    children = tuple(_part(child, nodes) for child in domain.children if not child.nodes.isdisjoint(nodes))
    grid = domain.grid
    if grid is not None:
        grid = Grid(grid.dimensions, tuple(name if name in nodes else "" for name in grid.places))
    return replace(domain, nodes=nodes, children=children, grid=grid)
