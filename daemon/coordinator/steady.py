"""The coordinator's own clock: the wall clock at the start, carried on by the monotonic one.

So the core's `now` never goes back and never jumps: an operator who sets the clock must not make nodes look silent.
"""

from __future__ import annotations

from muster.daemon import clock


class SteadyClock:
    """Seconds since the epoch, as of the start; not before `not_before` (the journal's newest record)."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(clock.wall(), not_before) - clock.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return clock.monotonic() + self._offset
