"""The coordinator's own clock: the wall clock at the start, carried on by the monotonic one.

So the core's `now` never goes back and never jumps: an operator who sets the clock must not make nodes look silent.
What others tell by the wall clock is carried over with `ahead_s` as often as it is read: the clock may have been wrong
at the start, and mended since.
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
        """Seconds by which it is ahead of the wall clock, as that goes by now."""
        return self.now() - self._wall()
