"""A problem that lasts, in the log: a line when it begins, when its words change, each minute, and when it is over.

What is tried again every second would otherwise write a line every second, for as long as a service of the host is
down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from muster.daemon.host import clock

REPEAT_S = 60.0
"""Seconds between two lines about a problem that stays the same."""
CHANGED_S = 10.0
"""Seconds between two lines about a problem whose words change: they may alternate."""


class LastingProblem:
    """One kind of problem. `logger`: where its lines go. `over`: the words of the line that says that it is over."""

    def __init__(self, logger: logging.Logger, over: str, now: Callable[[], float] = clock.monotonic) -> None:
        self._logger = logger
        self._over = over
        self._now = now
        self._words = ""
        self._began_at = self._logged_at = float("-inf")

    @property
    def lasts(self) -> bool:
        """Whether the problem was met since it was last over."""
        return self._began_at > float("-inf")

    def meet(self, words: str) -> None:
        """The problem is met, again or for the first time. `words`: what is wrong, and what would be right."""
        now = self._now()
        if not self.lasts:
            self._began_at = now
        if now - self._logged_at >= (REPEAT_S if words == self._words else CHANGED_S):
            self._words, self._logged_at = words, now
            lasts_s = now - self._began_at
            self._logger.warning("%s%s", words, f" (for {lasts_s:.0f} s now)" if lasts_s else "")

    def end(self) -> None:
        """What failed has worked."""
        if self.lasts:
            self._logger.info("%s, after %.0f s", self._over, self._now() - self._began_at)
        self._began_at = self._logged_at = float("-inf")
