"""What callers do wrong, as lines of the log, with a bound for each caller.

A caller may be refused as often as it likes, in any words. Without a bound, one user could fill the disk of the
management host with lines of the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

from muster.daemon.coordinator.services.attaches import FactRate
from muster.daemon.host import clock
from muster.daemon.host.plain_text import cut

LINES_AT_ONCE, LINE_INTERVAL_S = 100, 10.0
"""Lines of one caller that may follow each other at once, and seconds after which one more may."""
MOST_LINE_CHARS = 500
"""Of one line, which may quote a whole message of 4 MiB: 5 MiB a day at most."""


class CallerLog:
    """Writes to `logger`: of each caller some lines, and how many more there were."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = clock.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._rate = FactRate(LINES_AT_ONCE, LINE_INTERVAL_S)
        self._left_out: Counter[Hashable] = Counter()

    def log(self, level: int, caller: Hashable, words: str) -> None:
        """Log `words`, unless this caller has caused too many lines. `caller`: what it has proved to be, a uid for
        example."""
        words = cut(words, MOST_LINE_CHARS)
        if self._rate.is_too_often(caller, self._now()):
            self._left_out[caller] += 1
        elif left_out := self._left_out.pop(caller, 0):
            self._logger.log(level, "%s (%d lines about this caller were left out before)", words, left_out)
        else:
            self._logger.log(level, "%s", words)
