"""Which nodes have taken nothing of this node for a while, since when, and why: shards, reports and decisions are sent
again and again, and no version is committed meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from muster.wording import duration

SAID_AFTER_S = 5.0
"""Seconds after which a refusal is said. The loss of a node ends its generation earlier."""
_log = logging.getLogger(__name__)


class Refusals:
    """What is refused now. `now` returns monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._refused: dict[str, tuple[float, str]] = {}
        self._logged: set[str] = set()

    def note(self, node: str, why: str) -> None:
        """The node has refused something, or was not reached."""
        began, _ = self._refused.get(node, (self._now(), ""))
        self._refused[node] = began, why
        if self._now() - began >= SAID_AFTER_S and node not in self._logged:
            self._logged.add(node)
            _log.warning("no state is committed in memory: %s", self.words())

    def end(self, node: str) -> None:
        """The node has taken something."""
        self._refused.pop(node, None)
        self._logged.discard(node)

    def clear(self) -> None:
        """What was refused is not needed any more."""
        self._refused.clear()
        self._logged.clear()

    def words(self) -> str:
        """The longest refusal; empty: none lasts SAID_AFTER_S."""
        lasting = [
            (began, node, why) for node, (began, why) in self._refused.items() if self._now() - began >= SAID_AFTER_S
        ]
        if not lasting:
            return ""
        began, node, why = min(lasting)
        return f"{node} has taken nothing for {duration(round(self._now() - began))}: {why}"
