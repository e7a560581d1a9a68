"""Limits each command to Slurm to the time that is left of the caller's leadership lease.

Only the coordinator that holds the lease may change something in Slurm. A step that has begun must end before the lease
ends. The coordinator may be frozen at that time, so a separate timer also ends the step (`run_command.run`, the pyslurm
worker).
"""

from __future__ import annotations

import math
from collections.abc import Callable

LeaseGuard = Callable[[], float]
"""Returns the seconds that a step that begins now may take. If no step may begin, the call does not return: it ends
this process.
"""

BACKSTOP_DELAY_S = 1.0
"""Seconds between this process's own timeout and the separate timer. Normally this process is alive and ends the step
itself. A standby waits longer than this before it takes over (`LeaseTimeouts.takeover_s`).
"""


def no_lease() -> float:
    """The guard of a program that needs no lease: a step may take any time."""
    return math.inf
