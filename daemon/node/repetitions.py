"""Lines of the kernel log that count only when they repeat: when a count within a window of time is reached.

The signal is raised once, and again only after no such line has come for the time `clear_s` (hysteresis). Time is that
of the observations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from muster.daemon.node.sensors.sensor import Observation

MAX_DEVICES = 1000
"""Devices whose lines are counted, at most. A node has fewer; then the one that was quiet longest is forgotten."""


@dataclass(slots=True)
class _Lines:
    """The newest lines of one signal of one device: as many as count, at most."""

    times: deque[float]
    last_s: float = float("-inf")
    raised: bool = False


@dataclass(slots=True)
class Repetitions:
    """The counts of all signals of all devices."""

    _lines: dict[tuple[str, int, str], _Lines] = field(default_factory=dict)

    def is_reached(self, observation: Observation, count: int, window_s: float, clear_s: float) -> bool:
        """Count the observation. Returns whether the signal is raised now: `count` lines within `window_s` seconds."""
        lines = self._of_device(observation, count)
        now = observation.observed_s
        if now < lines.last_s or now - lines.last_s >= clear_s:  # a clock that was set back says nothing of the time
            lines.raised = lines.raised and now < lines.last_s
            lines.times.clear()
        lines.last_s = now
        lines.times.append(now)
        reached = len(lines.times) == count and now - lines.times[0] <= window_s
        new, lines.raised = reached and not lines.raised, reached or lines.raised
        return new

    def forget_all_but(self, kinds: set[tuple[str, int]]) -> None:
        """Forget the lines of signals, by kind and code, that no longer count by number."""
        self._lines = {key: lines for key, lines in self._lines.items() if key[:2] in kinds}

    def _of_device(self, observation: Observation, count: int) -> _Lines:
        key = (observation.kind, observation.code, observation.device)
        lines = self._lines.pop(key, None)
        if lines is None:
            lines = _Lines(deque(maxlen=count))
        elif lines.times.maxlen != count:
            lines = _Lines(deque(lines.times, maxlen=count), lines.last_s, lines.raised)
        if len(self._lines) >= MAX_DEVICES:
            del self._lines[next(iter(self._lines))]
        self._lines[key] = lines
        return lines
