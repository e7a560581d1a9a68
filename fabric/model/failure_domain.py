"""The kinds of failure domains that a fabric knows."""

from __future__ import annotations

from enum import Enum


class FailureDomain(Enum):
    """What takes several nodes down at once."""

    NODE = "node"
    LEAF = "leaf"
    RACK = "rack"
    POWER = "power"
