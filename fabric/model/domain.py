"""A part of the network that is entered and left over its own links: an NVLink domain, a leaf, a pod, the whole.

A domain is known by its set of nodes. Its name may change when a site adds a switch, so names are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.fabric.model.errors import FabricError
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.wording import counted


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain of the tree. The nodes that no child has are attached to the domain itself.

    Raises:
        FabricError: the children overlap, have nodes of their own, or are not tighter than their parent.
    """

    level: Level
    nodes: frozenset[str]
    """All nodes in this domain, those of its children too."""
    link: Link
    """What one flow alone has between nodes that this domain joins: nodes of two children, or nodes attached to it."""
    children: tuple[Domain, ...] = ()
    oversubscription: float = 1.0
    """How much more the children can send than this domain carries: 4 for 4:1. 1 is a full bisection."""
    uplink: Link | None = None
    """From this domain to its parent, if it was measured or has negotiated down. None: as the parent's link."""
    grid: Grid | None = None
    """How the nodes are neighbours, if the domain is a ring or a torus. Then `link` is one hop, and no child exists."""
    name: str = field(default="", compare=False)
    """For output only."""

    def __post_init__(self) -> None:
        """Refuses a domain that is no part of a tree."""
        if not 1 <= self.oversubscription <= 1e6:
            raise FabricError(f"{self.label} is oversubscribed {self.oversubscription:g}:1: choose 1 to 1000000")
        for child in self.children:
            if child.level > self.level:
                raise FabricError(f"{child.label} ({child.level.word}) lies in {self.label} ({self.level.word})")
            if not child.nodes <= self.nodes:
                raise FabricError(f"{child.label} has nodes that {self.label} around it lacks")
        if len(frozenset().union(*(c.nodes for c in self.children))) != sum(len(c.nodes) for c in self.children):
            raise FabricError(f"two domains in {self.label} share a node: a node has one place in the tree")
        if self.grid and (self.children or not self.nodes <= set(self.grid.places)):
            raise FabricError(
                f"{self.label} is a torus: each of its nodes needs a position, and it has no domains inside"
            )

    @property
    def label(self) -> str:
        """The name, or the level and the number of nodes if it has none."""
        return self.name or f"{self.level.word} of {counted(len(self.nodes), 'node')}"

    @property
    def own_nodes(self) -> frozenset[str]:
        """The nodes attached to this domain itself, and to none of its children."""
        return self.nodes.difference(*(child.nodes for child in self.children))

    def walk(self) -> Iterator[Domain]:
        """This domain and all domains inside, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()
