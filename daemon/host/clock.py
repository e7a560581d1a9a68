"""The clock: the one place that asks what time it is.

Wall clock for what people and journals read; deadlines and ages use the monotonic clock, which never jumps.
"""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since the epoch."""
    return time.time()


def monotonic() -> float:
    """Seconds since an arbitrary moment of this boot; never goes back."""
    return time.monotonic()


def boottime() -> float:
    """As `monotonic`, and goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
