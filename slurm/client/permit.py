"""Who may change something in Slurm: asked before each single step, however many a call takes.

Of two coordinators one may act, and for so long as its lease lasts. A step that it has begun has to be over by then,
even where nobody is left to end it: so something else is told when (`command.run`, the pyslurm worker).
"""

from __future__ import annotations

import math
from collections.abc import Callable

Permit = Callable[[], float]
"""Seconds for which a step that begins now may go on. Does not return where nothing may be begun."""

OVERTIME_S = 1.0
"""How much later a step ends by itself than by us, who are alive as a rule. Who takes over waits longer
(`LeaseTimeouts.takeover_s`)."""


def unopposed() -> float:
    """Nobody else acts: a step may take as long as it takes."""
    return math.inf
