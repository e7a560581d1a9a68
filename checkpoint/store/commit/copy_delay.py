"""How much longer a job's steps take because its versions are copied to other nodes meanwhile. Pure.

Copies share cores, memory and network with the training. What that costs is seen in the steps themselves: those that
end between a snapshot and its commit, and the one in which the commit comes, are compared with all others.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

SAMPLES, ENOUGH_SAMPLES = 32, 4
"""Newest measurements that count, and the fewest from which anything is concluded."""
_DOUBT = 2 * 1.4826 * 1.2533
"""Times the median deviation of the samples over the root of their number: two standard errors of their median. 1.4826
makes a standard deviation of a median deviation, 1.2533 (√(π/2)) the error of a median, both for a normal
distribution."""


@dataclass
class CopyDelay:
    """The steps of one rank. Times are seconds."""

    _copying: bool = False
    _is_slowed: bool = False
    """Something was copied since the newest step ended."""
    _slowed_s: float = 0.0
    _slowed_steps: int = 0
    _clear: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _delays: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def begin(self) -> None:
        """A snapshot was taken, and is copied from now on."""
        self._settle()
        self._copying = self._is_slowed = True

    def end(self) -> None:
        """It is committed."""
        self._copying = False

    def pause(self) -> None:
        """Steps are not measured until the next one begins, and of this version nothing is concluded."""
        self._copying = self._is_slowed = False
        self._slowed_s, self._slowed_steps = 0.0, 0

    def note_step(self, step_s: float, steps: int) -> None:
        """So many steps have ended that took `step_s` each, without the stall of a snapshot."""
        if not self._is_slowed:
            self._clear.append(step_s)
            return
        self._slowed_s += step_s * steps
        self._slowed_steps += steps
        self._is_slowed = self._copying
        if not self._copying:
            self._settle()

    def _settle(self) -> None:
        if self._slowed_steps and self.clear_step_s:
            self._delays.append(self._slowed_s - self._slowed_steps * self.clear_step_s)
        self._slowed_s, self._slowed_steps = 0.0, 0

    @property
    def clear_step_s(self) -> float:
        """Median of a step while nothing is copied; 0: too few were measured."""
        return median(self._clear) if len(self._clear) >= ENOUGH_SAMPLES else 0.0

    @property
    def delay_s(self) -> float:
        """By how much the copies of one version delay the training, as far as that is certain: steps differ from each
        other for many reasons. 0: not measured, or nothing."""
        if len(self._delays) < ENOUGH_SAMPLES:
            return 0.0
        middle = median(self._delays)
        deviation = median(abs(delay - middle) for delay in self._delays)
        doubt: float = _DOUBT * deviation / len(self._delays) ** 0.5
        return max(0.0, middle - doubt)
