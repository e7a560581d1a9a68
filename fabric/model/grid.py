"""Networks without switches: a ring, a torus of two or three dimensions. Nodes are neighbours of nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from muster.fabric.model.errors import FabricError, UnknownNode

MOST_POSITIONS = 1_000_000
"""Positions of one grid. A larger one is a mistake."""


@dataclass(frozen=True)
class Grid:
    """A torus of one (ring), two or three dimensions. Each position has a link to the next and the one before in each
    dimension, and the last position of a dimension is next to the first.

    Raises:
        FabricError: the dimensions don't fit the nodes.
    """

    dimensions: tuple[int, ...]
    """Positions in each dimension: (16,) is a ring of 16, (4, 4, 8) a torus."""
    places: tuple[str, ...]
    """The node of each position; "" for a position without a node. The last dimension varies fastest."""

    def __post_init__(self) -> None:
        """Refuses dimensions that don't fit the nodes."""
        shape = "x".join(map(str, self.dimensions))
        if not 1 <= len(self.dimensions) <= 3 or min(self.dimensions) < 1:
            raise FabricError(f"a torus of {shape or 'no dimension'}: it has 1 to 3 dimensions of 1 position or more")
        if math.prod(self.dimensions) > MOST_POSITIONS:
            raise FabricError(f"a torus of {shape} has more than {MOST_POSITIONS} positions")
        if math.prod(self.dimensions) != len(self.places):
            raise FabricError(
                f"a torus of {shape} has {math.prod(self.dimensions)} positions, and {len(self.places)} were given"
            )
        named = [name for name in self.places if name]
        if len(named) != len(set(named)):
            twice = next(name for name in named if named.count(name) > 1)
            raise FabricError(f"node {twice} has two positions in one torus: a node has one position")

    def coordinates(self, node: str) -> tuple[int, ...]:
        """The position of `node` in each dimension. Raises UnknownNode."""
        try:
            index = self._index[node]
        except KeyError:
            raise UnknownNode(f"node {node} has no position in this torus") from None
        found = []
        for size in reversed(self.dimensions):
            index, here = divmod(index, size)
            found.append(here)
        return tuple(reversed(found))

    def hops(self, a: str, b: str) -> int:
        """Links on the shortest way from node `a` to node `b`. Raises UnknownNode."""
        return sum(
            min(abs(x - y), size - abs(x - y))
            for x, y, size in zip(self.coordinates(a), self.coordinates(b), self.dimensions, strict=True)
        )

    @cached_property
    def _index(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.places) if name}
