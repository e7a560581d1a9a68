"""How fast each tier is, until a site or a measurement says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import GPU_LINK

USUAL_LINKS: Mapping[Level, Link] = MappingProxyType(
    {
        Level.NODE: GPU_LINK,
        Level.NVLINK: Link(1e-6, 300e9),
        Level.LEAF: Link(5e-6, 12.5e9),
        Level.POD: Link(6e-6, 12.5e9),
        Level.ANY: Link(7e-6, 12.5e9),
    }
)
"""100 Gb/s a node, NVLink 3 in a domain. Each further pair of switches adds about 1 µs: two hops of 0.3 µs, and cables.

A site whose network is faster says so in fabric.toml. What is packed tightly comes out first with any of them.
"""


@dataclass(frozen=True)
class Tiers:
    """Links and oversubscription by level."""

    links: Mapping[Level, Link] = field(default_factory=lambda: USUAL_LINKS)
    oversubscription: Mapping[Level, float] = field(default_factory=dict)
    """N for N:1. A level without an entry has its full bisection."""

    def link(self, level: Level) -> Link:
        """The link of a domain of `level`."""
        return self.links.get(level) or USUAL_LINKS[level]

    def ratio(self, level: Level) -> float:
        """The oversubscription of a domain of `level`."""
        return self.oversubscription.get(level, 1.0)
