"""Observations that the coordinator has not confirmed: kept while it is away, and sent again afterwards.

For each kind, code and device only one observation waits, so that a storm of one error can't displace the others. The
end of a signal that has returned meanwhile is not sent: what the coordinator hears last is how it is. The coordinator's
answer to the message is the confirmation. An observation that leaves the outbox, or does not get in, is handled. What
was sent on a broken stream counts as not sent.
"""

from __future__ import annotations

import asyncio
import logging

from muster.daemon.node.sensors.sensor import OVER, Observation

MAX_WAITING = 1000
_log = logging.getLogger(__name__)


class Outbox:
    """A bounded, ordered set of observations. Not thread-safe."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._waiting: dict[tuple[str, int, str], Observation] = {}
        self._sent: set[tuple[str, int, str]] = set()
        self.changed = asyncio.Event()

    def put(self, observation: Observation) -> None:
        """Add an observation unless an equal one waits. If the outbox is full, the oldest is dropped with a warning."""
        key = _key(observation)
        end = (observation.kind + OVER, observation.code, observation.device)
        if self._waiting.pop(end, None):
            self._sent.discard(end)
        if key in self._waiting and key not in self._sent:
            observation.handled()
            return
        self._sent.discard(key)
        before = self._waiting.pop(key, None)
        self._waiting[key] = observation
        if before:
            before.handled()
        if len(self._waiting) > self._limit:
            oldest = self._waiting.pop(next(iter(self._waiting)))
            self._sent.discard(_key(oldest))
            oldest.handled()
            _log.warning("%d signals wait for the coordinator; dropped: %s", self._limit, oldest.text)
        self.changed.set()

    def next_unsent(self) -> Observation | None:
        """Return the oldest observation that was not sent on this stream, and mark it as sent; None: there is none."""
        for key, observation in self._waiting.items():
            if key not in self._sent:
                self._sent.add(key)
                return observation
        self.changed.clear()
        return None

    def confirm(self, observation: Observation) -> None:
        """The coordinator has answered to this observation: remove it."""
        key = _key(observation)
        if self._waiting.get(key) is observation:
            del self._waiting[key]
            self._sent.discard(key)
            observation.handled()

    def rewind(self) -> None:
        """A new stream begins: send again what was not confirmed."""
        self._sent.clear()
        self.changed.set()

    def __len__(self) -> int:
        return len(self._waiting)


def _key(observation: Observation) -> tuple[str, int, str]:
    return observation.kind, observation.code, observation.device
