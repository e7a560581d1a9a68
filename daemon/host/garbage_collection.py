"""Python's garbage collector in a process that keeps very many objects for long."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000
"""New objects after which the collector looks for cycles; Python's own value is 700. A coordinator has some hundred
objects for each stream, and they live as long as the stream: with 2,000 nodes, a tenth of its processor time went into
looking through them (measured). Few of Muster's objects are in cycles, so little memory waits meanwhile."""


def collect_seldom() -> None:
    """Let the collector run seldom from now on."""
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
