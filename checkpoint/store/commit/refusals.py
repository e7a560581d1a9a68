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
        self._refused: dict[str, tuple[float, float, str]] = {}
        """When the first and the last refusal came, and why, by node."""
        self._logged: set[str] = set()

    def note(self, node: str, why: str) -> None:
        """The node has refused something, or was not reached."""
        now = self._now()
        began, _, _ = self._refused.get(node, (now, now, ""))
        self._refused[node] = began, now, why
        if self._lasts(node) and node not in self._logged:
            self._logged.add(node)
            _log.warning("no state is committed in memory: %s", self._words_of(node))

    def end(self, node: str) -> None:
        """The node has taken something, or need not take it any more."""
        self._refused.pop(node, None)
        self._logged.discard(node)

    def clear(self) -> None:
        """What was refused is not needed any more."""
        self._refused.clear()
        self._logged.clear()

    def words(self) -> str:
        """The longest refusal; empty: none lasts SAID_AFTER_S."""
        lasting = [(began, node) for node, (began, _, _) in self._refused.items() if self._lasts(node)]
        return self._words_of(min(lasting)[1]) if lasting else ""

    def _lasts(self, node: str) -> bool:
        """A node that has refused once may be taking something since: it had no order yet, and transfers are long."""
        began, last, _ = self._refused[node]
        return last - began >= SAID_AFTER_S

    def _words_of(self, node: str) -> str:
        began, _, why = self._refused[node]
        return f"{node} has taken nothing for {duration(round(self._now() - began))}: {why}"
