"""The coordinator's own clock: the wall clock at the start, carried on by the monotonic clock.

The core's `now` never goes back and never jumps: an operator who sets the clock must not make nodes look silent. Slurm
and others give times of the wall clock. Such a time is converted with `ahead_s` each time it is read, because the wall
clock may have been wrong at the start and corrected since.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.host import clock


class SteadyClock:
    """Seconds since the epoch, as of the start; not before `not_before` (the journal's newest record)."""

    def __init__(
        self,
        not_before: float = 0.0,
        wall: Callable[[], float] = clock.wall,
        monotonic: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._offset = max(wall(), not_before) - monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._monotonic() + self._offset

    def ahead_s(self) -> float:
        """Seconds by which this clock is ahead of the current wall clock."""
        return self.now() - self._wall()
