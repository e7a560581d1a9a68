"""What counts more than predicted seconds: the levels in which a job requires or prefers its groups. Pure."""

from __future__ import annotations

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level

BROKEN_REQUIREMENT_S = 1e6
"""Seconds that a link outside the required level costs: more than any traffic, so that few links are outside."""
PREFERENCE = 100.0
"""A link outside the preferred level counts as so many: a preference outweighs traffic that is not far heavier."""


def weighed(seconds: float, fabric: Fabric, a: str, b: str, required: Level, preferred: Level) -> float:
    """What a link between two nodes costs, if its traffic takes `seconds`."""
    if not _together(fabric, a, b, preferred):
        seconds *= PREFERENCE
    return seconds if _together(fabric, a, b, required) else seconds + BROKEN_REQUIREMENT_S


def _together(fabric: Fabric, a: str, b: str, level: Level) -> bool:
    return level is Level.ANY or b in fabric.domain(a, level).nodes
