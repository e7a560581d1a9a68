"""A network topology as Slurm has it, and the fabric that results.

`muster.slurm.client` makes the records from what Slurm prints. Slurm's configuration may hold several topologies at the
same time: each partition uses one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import prod

from muster.fabric.model.domain import Domain
from muster.fabric.model.errors import FabricError
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.node import Node, natural_order
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.wording import counted, listed

_FEW = 10
"""Of so many nodes one may contradict the rest of a topology; one node always may."""
_MOST_NAMED = 40
"""Names in a warning: it is read once, beside the file that it is about."""


class Kind(Enum):
    """What joins the nodes of a unit. The values are the names of Slurm's plugins."""

    TREE = "tree"
    BLOCK = "block"
    RING = "ring"
    TORUS = "torus3d"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class Unit:
    """A switch with all nodes below it, a block, an aggregated block, a ring, or a torus."""

    name: str
    nodes: tuple[str, ...]
    """Of a ring or torus: in Slurm's order, x fastest; "" for a position without a node."""
    dimensions: tuple[int, ...] = ()
    """Of a torus: x, y, z."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """Of a torus: the shapes that jobs may have, each as x, y, z. Jobs of other numbers of nodes never start there."""
    aggregated: bool = False
    """Whether it joins several blocks."""
    size: int = 0
    """Of a block: its nodes as configured, also those that are yet to come. 0: Slurm does not tell."""


@dataclass(frozen=True, slots=True)
class SlurmTopology:
    """One topology of Slurm's configuration."""

    kind: Kind
    units: tuple[Unit, ...] = ()
    name: str = ""
    """Empty if Slurm has one topology only, without a name."""
    default: bool = True
    """Whether partitions that name no topology use this one."""
    partitions: tuple[str, ...] = ()
    """The partitions that name this topology. All others use the default."""
    members: tuple[str, ...] = ()
    """The nodes of all partitions that use this topology. Empty if Slurm has one topology only: then all nodes do."""
    base_block: int = 0
    """Of blocks: the nodes that Slurm plans with in each of the smallest blocks. 0 elsewhere."""
    problem: str = ""
    """Why the kind is FLAT although Slurm has another topology; empty if nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A fabric, and what could not be understood on the way."""

    fabric: Fabric
    warnings: tuple[str, ...] = ()
    """If the topology itself could not be understood, the fabric is flat, and the first warning says why."""


def read_fabric(
    topology: SlurmTopology,
    nodes: Collection[str],
    tiers: Tiers,
    details: Sequence[Node] = (),
    extra: Sequence[NodeSet] = (),
) -> Reading:
    """The fabric of `nodes`, which are all nodes that Slurm has, under `topology`.

    A topology that is none becomes a flat network with a warning: a wrong map would be worse than none. Only if few
    nodes make it none, because each is below two switches, they alone count as below none.

    Args:
        details: what is known of nodes.
        extra: domains that Slurm does not know: a site's switches, NVLink domains. If they do not fit into Slurm's
            topology, they are left out with a warning.
    """
    known = frozenset(nodes)
    details = [node for node in details if node.name in known]
    extra = [replace(one, nodes=one.nodes & known) for one in extra]
    named = f"the topology{f' {topology.name}' if topology.name else ''} is taken as flat: "
    if topology.problem:
        return Reading(flat_fabric(known, tiers, details), (named + topology.problem,))
    try:
        sets, torn = _without_torn(list(_node_sets(topology, known)), known)
        fabric_of(sets, known, tiers)
    except FabricError as error:
        return Reading(flat_fabric(known, tiers, details), (f"{named}{error}",))
    warnings = ["; ".join(found)] if (found := list(_misfits(topology, known, torn))) else []
    try:
        return Reading(fabric_of([*sets, *extra], known, tiers, details), tuple(warnings))
    except FabricError as error:
        warnings.append(f"Slurm's topology is taken without the site's own switches and NVLink domains: {error}")
        return Reading(fabric_of(sets, known, tiers, details), tuple(warnings))


def flat_fabric(nodes: Collection[str], tiers: Tiers, details: Sequence[Node] = ()) -> Fabric:
    """All nodes on one network of which nothing is known."""
    link, ratio = tiers.link(Level.ANY), tiers.ratio(Level.ANY)
    return Fabric(Domain(Level.ANY, frozenset(nodes), link, (), ratio), tuple(details))


def _node_sets(topology: SlurmTopology, known: frozenset[str]) -> Iterator[NodeSet]:
    """The units as sets. Nodes that Slurm does not have are left out of them."""
    for unit in topology.units if topology.kind is not Kind.FLAT else ():
        nodes = known.intersection(unit.nodes)
        grid = None
        if topology.kind in (Kind.RING, Kind.TORUS):
            grid = _grid(unit, known)
        yield NodeSet(nodes, unit.name, grid=grid)


def _grid(unit: Unit, known: frozenset[str]) -> Grid:
    """Slurm counts x fastest; a `Grid` counts its last dimension fastest."""
    dimensions = unit.dimensions or (len(unit.nodes),)
    if min(dimensions) < 1 or prod(dimensions) != len(unit.nodes):
        shape = "x".join(map(str, dimensions))
        raise FabricError(f"{unit.name[:80]} of {shape} has the positions of {counted(len(unit.nodes), 'node')}")
    strides = [prod(dimensions[:axis]) for axis in range(len(dimensions))]
    places = (
        unit.nodes[sum(at * stride for at, stride in zip(position, strides, strict=True))]
        for position in product(*map(range, dimensions))
    )
    return Grid(dimensions, tuple(name if name in known else "" for name in places))


def _without_torn(sets: list[NodeSet], known: frozenset[str]) -> tuple[list[NodeSet], frozenset[str]]:
    """The sets without the few nodes that two of them share although neither holds the other, and these nodes.

    If they are not few, the sets are as they were: a network of which much is contradictory is not known.
    """
    torn: set[str] = set()
    overlapping: set[int] = set()
    top_of: dict[str, int] = {}
    for at in sorted(range(len(sets)), key=lambda at: len(sets[at].nodes)):  # the smaller one first
        nodes = sets[at].nodes
        for top in {top_of[node] for node in nodes if node in top_of}:
            if not sets[top].nodes <= nodes:
                torn |= sets[top].nodes & nodes
                overlapping |= {top, at}
        top_of.update(dict.fromkeys(nodes, at))
    if not torn or len(torn) > max(1, len(known) // _FEW):
        return sets, frozenset()
    without = [sets[at].nodes for at in overlapping]
    whole = [
        replace(one, nodes=one.nodes - torn) if any(one.nodes <= nodes for nodes in without) else one for one in sets
    ]
    return whole, frozenset(torn)


def _misfits(topology: SlurmTopology, known: frozenset[str], torn: frozenset[str]) -> Iterator[str]:
    """What does not fit between the topology and Slurm's list of nodes, or within the topology."""
    if topology.kind is Kind.FLAT:
        return
    named = {name for unit in topology.units for name in unit.nodes if name}
    if strange := sorted(named - known, key=natural_order):
        yield f"the topology has {counted(len(strange), 'node')} that Slurm does not have: {_all(strange)}"
    if torn:
        what = counted(len(torn), "node is below two switches, and is", "nodes are below two switches, and are")
        yield f"{what} taken as below none: {_all(sorted(torn, key=natural_order))}"
    if outside := sorted(known - named, key=natural_order):
        what = counted(len(outside), "node is", "nodes are")
        yield f"{what} in no switch or block of the topology: {_all(outside)}"


def _all(names: Sequence[str]) -> str:
    """So many names that an administrator can find each of them in a file."""
    return listed(names, ", ", _MOST_NAMED)
