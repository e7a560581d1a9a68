"""The clock: only this module asks what time it is.

Use the wall clock for what people and journals read. Use the monotonic clock, which never jumps, for deadlines and
ages.
"""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since the epoch."""
    return time.time()


def monotonic() -> float:
    """Seconds since an arbitrary moment of this boot; the value never goes back."""
    return time.monotonic()


def thread_cpu() -> float:
    """Seconds of a processor that this thread has taken. A busy machine makes them no longer."""
    return time.thread_time()


def boottime() -> float:
    """As `monotonic`, but continues while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
