"""Makes the tree of domains from sets of nodes: whichever set holds another one is above it.

Names and levels that a source gives are not needed for that, so a switch with two parents, two switches with the same
nodes, or a name that has shifted lead to no wrong tree. Sets that overlap, and neither holds the other, are no tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.fabric.model.domain import Domain
from muster.fabric.model.errors import FabricError
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node, natural_order
from muster.fabric.sources.tiers import Tiers
from muster.wording import counted, listed

MOST_TIERS = 16
"""Sets within one another. A real network has five or so, and a deeper one is a mistake."""


@dataclass(frozen=True, slots=True)
class NodeSet:
    """Nodes that something joins: a switch with all below it, a block, an NVLink domain, a torus."""

    nodes: frozenset[str]
    name: str = ""
    nvlink: bool = False
    grid: Grid | None = None
    uplink: Link | None = None
    """From there to the tier above, if it differs from that tier's link."""


@dataclass(slots=True, eq=False)
class _Place:
    """A set in the tree, while the tree is made."""

    of: NodeSet
    inside: list[_Place] = field(default_factory=list)
    height: int = 0
    """Tiers of switches below. An NVLink domain is none."""
    depth: int = 0
    """Sets within this one, one within another."""


def fabric_of(sets: Iterable[NodeSet], nodes: Iterable[str], tiers: Tiers, details: Sequence[Node] = ()) -> Fabric:
    """The fabric of `nodes` with the domains `sets`. Nodes that no set holds are attached to the root.

    The smallest sets are leaves, those above them pods, all above pods ANY. A set that holds all nodes and other sets
    is the root itself.

    Raises:
        FabricError: two sets overlap and neither holds the other, or more than MOST_TIERS lie within one another.
    """
    every = frozenset(nodes)
    tops = _nest([part for part in _merged(sets) if part.nodes])
    if strange := frozenset().union(*(top.of.nodes for top in tops)) - every:
        raise FabricError(f"nodes that the cluster does not have: {_some(strange)}")
    name = ""
    if len(tops) == 1 and tops[0].height and tops[0].of.nodes == every and not tops[0].of.nvlink:
        name, tops = tops[0].of.name, tops[0].inside
    link, ratio = tiers.link(Level.ANY), tiers.ratio(Level.ANY)
    children = tuple(_domain(top, tiers) for top in tops)
    return Fabric(Domain(Level.ANY, every, link, children, ratio, name=name), tuple(details))


def fabric_of_leaves(leaf_of: Mapping[str, str]) -> Fabric:
    """A fabric of which no more is known than the leaf switch of each node; "" for none."""
    below: dict[str, set[str]] = {}
    for node, leaf in leaf_of.items():
        if leaf:
            below.setdefault(leaf, set()).add(node)
    return fabric_of([NodeSet(frozenset(nodes), leaf) for leaf, nodes in below.items()], leaf_of, Tiers())


def _merged(sets: Iterable[NodeSet]) -> list[NodeSet]:
    """The sets, each once: several switches with the same nodes are one domain (planes, rails, parallel spines)."""
    found: dict[tuple[frozenset[str], bool], NodeSet] = {}
    for one in sets:
        same = found.get((one.nodes, one.nvlink))
        if same is None:
            found[one.nodes, one.nvlink] = one
        elif one.name and one.name != same.name:
            found[one.nodes, one.nvlink] = NodeSet(
                one.nodes, f"{same.name},{one.name}", one.nvlink, same.grid or one.grid, same.uplink or one.uplink
            )
    return list(found.values())


def _nest(sets: Iterable[NodeSet]) -> list[_Place]:
    """The sets that no other set holds, with all others inside them."""
    top_of: dict[str, _Place] = {}
    tops: dict[int, _Place] = {}
    # The smaller set first. Of two equal ones, the NVLink domain is inside.
    for one in sorted(sets, key=lambda one: (len(one.nodes), not one.nvlink)):
        place = _Place(one)
        inside = {id(top): top for node in one.nodes if (top := top_of.get(node))}
        for top in inside.values():
            if not top.of.nodes <= one.nodes:
                raise FabricError(
                    f"{_label(top.of)} and {_label(one)} share {_some(top.of.nodes & one.nodes)}, and neither holds the"
                    " other: this is no tree"
                )
            if one.nvlink or one.grid:
                kind = "an NVLink domain" if one.nvlink else "a ring or torus"
                raise FabricError(f"{_label(top.of)} lies within {_label(one)}, which is {kind} and has no parts")
            place.inside.append(top)
            place.height = max(place.height, top.height + (not top.of.nvlink))
            place.depth = max(place.depth, top.depth + 1)
            del tops[id(top)]
        if place.depth >= MOST_TIERS:
            raise FabricError(f"more than {MOST_TIERS} tiers lie above one another: a network has a few")
        place.inside.sort(key=_order)
        tops[id(place)] = place
        top_of.update(dict.fromkeys(one.nodes, place))
    return sorted(tops.values(), key=_order)


def _domain(place: _Place, tiers: Tiers) -> Domain:
    of = place.of
    level = (Level.LEAF, Level.POD, Level.ANY)[min(place.height, 2)]
    if of.nvlink:
        level = Level.NVLINK
    elif of.grid:
        level = Level.POD  # a torus has no leaf switches: its nodes fail one by one
    children = tuple(_domain(inside, tiers) for inside in place.inside)
    return Domain(level, of.nodes, tiers.link(level), children, tiers.ratio(level), of.uplink, of.grid, name=of.name)


def _order(place: _Place) -> tuple[tuple[int, int, str], ...]:
    """Sort key of a set. Without a name, the first node decides."""
    return natural_order(place.of.name or min(place.of.nodes))


def _label(of: NodeSet) -> str:
    return of.name[:80] or f"a domain of {counted(len(of.nodes), 'node')}"


def _some(names: Iterable[str]) -> str:
    return listed(sorted(names), ", ")
