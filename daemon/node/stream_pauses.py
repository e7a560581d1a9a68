"""Timeouts of the node's stream to the coordinator, and the pauses before it is opened again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_CROWDING = 4
"""The longest time in which a node returns, in multiples of what the coordinator asked for. A node whose attach fails
after long doubles its time: many others attach at the same moment."""


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """Timeouts and backoff, in seconds. The answer to hello may wait for Slurm, and for the hellos of all other nodes;
    every other answer is immediate."""

    hello_timeout_s: float = 60.0
    answer_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_return_s: float = 60.0
    """The longest time within which a coordinator may ask this node to return."""
    crowded_s: float = 10.0
    """If an attempt to attach failed after a longer time, too many other nodes were there."""
    uniform: Callable[[float, float], float] = random.uniform

    def backoffs(self) -> Iterator[float]:
        """Yield the wait before each further try: it doubles, and each is random between half and all of it."""
        pause = self.first_backoff_s
        while True:
            yield self.uniform(pause / 2, pause)
            pause = min(2 * pause, self.max_backoff_s)


DEFAULT_TIMEOUTS = StreamTimeouts()


class ReturnPause:
    """The pause of a node that has lost its coordinator, as long as the coordinator asked for. All nodes of a site get
    the same time, and return in it one after another."""

    def __init__(self, timeouts: StreamTimeouts) -> None:
        self._timeouts = timeouts
        self._within_s = 0.0
        self._crowding = 1
        self._has_paused = False
        self._attempt_began_at = float("inf")

    def begin_attempt(self, now: float) -> None:
        """An attempt to attach begins. `now`: seconds of the clock that `stream_ended` has, too."""
        self._attempt_began_at = now

    def answered(self, within_s: float) -> None:
        """The coordinator has answered. It asks this node to return within `within_s` seconds if the stream ends."""
        self._within_s = min(within_s, self._timeouts.max_return_s)
        self._crowding, self._has_paused, self._attempt_began_at = 1, False, float("inf")

    def stream_ended(self, now: float) -> None:
        """The attempt has failed, or the stream of an answered one has ended."""
        if now - self._attempt_began_at > self._timeouts.crowded_s:
            self._crowding = min(2 * self._crowding, MAX_CROWDING)

    def choose(self) -> float:
        """Seconds until the next attempt.

        The first pause is random. Each further pause has the same length at all nodes, so the nodes keep their
        distances. With a random pause each time, they would come at twice the rate.
        """
        longest = self._crowding * self._within_s
        shortest = longest if self._has_paused else 0.0
        self._has_paused = True
        return self._timeouts.uniform(shortest, longest)
