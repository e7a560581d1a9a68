"""How much a counter of the kernel has grown, told with care.

A growth counts when the next reading confirms it. A counter that jumps back (a wrap, a reset, a value half written) has
no growth, and neither has its next step: the counter may only return to where it was. A counter that stands at the
largest value of its width is stuck, as in old firmware, and says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

STUCK = frozenset({2**8 - 1, 2**16 - 1, 2**32 - 1, 2**64 - 1})
"""The largest values of the widths that counters have."""


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a counter grew, in how many seconds."""

    amount: int
    passed_s: float

    @property
    def per_s(self) -> float:
        """The growth in a second."""
        return self.amount / self.passed_s


class CounterGrowth:
    """One counter. `most_per_s`: a faster growth is a counter that jumps."""

    def __init__(self, most_per_s: float) -> None:
        self._most_per_s = most_per_s
        self._last: tuple[int, float] | None = None
        self._pending: Growth | None = None
        self._jumped = False

    def next(self, value: int | None, now: float) -> Growth | None:
        """The growth of the reading before, confirmed by this one; None: nothing is known. `now`: monotonic seconds."""
        if value is None or value in STUCK:
            return None
        last, self._last = self._last, (value, now)
        if last is None or now <= last[1]:
            return None
        confirmed, self._pending = self._pending, None
        grown = Growth(value - last[0], now - last[1])
        jumped_before, self._jumped = self._jumped, grown.amount < 0 or grown.per_s > self._most_per_s
        if self._jumped:
            return None
        if not jumped_before:
            self._pending = grown
        return confirmed
