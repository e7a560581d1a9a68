"""The errors of the fabric."""

from __future__ import annotations


class FabricError(ValueError):
    """A fabric that no cluster has. The message says what is wrong and what would be right."""


class UnknownNode(FabricError):
    """The fabric has no node of this name."""
