"""What a coordinator gives up first when it has too much to do: those who watch. Pure.

The measure is the event loop's lag: by how much a timer comes late. It is how long a heartbeat, a signal or an order
waits for its turn. Above one limit no new watchers are admitted; above a second one the watchers under way end. Both
get "try again", and `muster` does so by itself. Streams of agents and node daemons are always read: what they say
decides whether nodes are taken for dead.

One late timer says little: a snapshot is written, or the process was suspended. So a limit counts as exceeded when each
of the newest samples exceeds it, and shedding ends when each of more samples is well below the first limit.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass

CALM_FRACTION = 0.5
"""Shedding ends below this fraction of `refuse_s`: without watchers the lag is smaller, so it would begin again."""


@dataclass(frozen=True, slots=True)
class SheddingLimits:
    """Args:
    refuse_s: seconds of lag above which no new watchers are admitted. A verdict has one second. With 2,000 heartbeats a
        second and 1,000 watchers, 0.9 of a core, the lag is 0.13 s at most (measured, `make bench-trust`).
    end_s: seconds of lag above which watchers under way end.
    samples: samples, one each 0.25 s or more, that must exceed a limit.
    calm_samples: samples that must be calm before shedding ends.
    """

    refuse_s: float = 0.25
    end_s: float = 0.5
    samples: int = 6
    calm_samples: int = 20


NOBODY_IS_GIVEN_UP = SheddingLimits(refuse_s=math.inf, end_s=math.inf)
"""For `muster run --local`: its watcher is the run itself, and a busy workstation must not end a training."""


class Shedding(enum.IntEnum):
    """What is given up now. Each level includes those before it."""

    NOTHING = 0
    NEW_WATCHERS = 1
    ALL_WATCHERS = 2


class LoadShedding:
    """Decides from the lag what is given up. `level`: now."""

    def __init__(self, limits: SheddingLimits = SheddingLimits()) -> None:  # frozen
        self._limits = limits
        self._lags: deque[float] = deque(maxlen=max(limits.samples, limits.calm_samples))
        self.level = Shedding.NOTHING

    def note(self, lag_s: float) -> bool:
        """Note one sample of the lag. Returns whether `level` has changed."""
        self._lags.append(lag_s)
        before = self.level
        self.level = Shedding.NOTHING if self._is_calm() else max(before, self._exceeded())
        return self.level is not before

    def _exceeded(self) -> Shedding:
        newest = list(self._lags)[-self._limits.samples :]
        least = min(newest) if len(newest) == self._limits.samples else 0.0
        if least > self._limits.end_s:
            return Shedding.ALL_WATCHERS
        return Shedding.NEW_WATCHERS if least > self._limits.refuse_s else Shedding.NOTHING

    def _is_calm(self) -> bool:
        """Whether shedding, if it is under way, may end."""
        newest = list(self._lags)[-self._limits.calm_samples :]
        enough = len(newest) == self._limits.calm_samples
        return enough and max(newest) < CALM_FRACTION * self._limits.refuse_s
