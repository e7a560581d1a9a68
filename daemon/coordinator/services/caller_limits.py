"""What one caller may cause in a time: attaches as somebody new, lines of the log, large answers; and one attach after
another.

To attach as somebody new writes facts into the journal each time; so does the word that a signal which lasted is over.
A process that attaches again, as what the journal knows, writes no fact. It may do that as often as its network fails,
so honest processes never meet this limit: a node starts a new agent or boots a few times in an hour.

To attach costs much more than a heartbeat: facts for the journal, a certificate. When thousands of daemons attach at
once, many of their hellos are ready at the same turn of the event loop. A heartbeat that came after them would wait for
all of them, and its sender would take the coordinator for dead. With turns, it waits for one.

A caller may be refused as often as it likes, in any words. Without a bound, one user could fill the disk of the
management host with lines of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from muster.daemon.coordinator.services.rpc_errors import resource_exhausted
from muster.daemon.host import clock
from muster.daemon.host.plain_text import cut

BURST = 20
"""Attaches as somebody new that may follow each other at once."""
INTERVAL_S = 60.0
"""Seconds after which one more is allowed."""
SWEEP_AT = 1024
"""Entries from which on those that count nothing any more are removed: again when twice as many as were left are there,
so that a site whose nodes all attach at once does not look through all of them for each."""
LINES_AT_ONCE, LINE_INTERVAL_S = 100, 10.0
"""Lines of one caller that may follow each other at once, and seconds after which one more may."""
MOST_LINE_CHARS = 500
"""Of one line, which may quote a whole message of 4 MiB: 5 MiB a day at most."""


class FactRate:
    """Counts for each identity: a node, or a node of a gang. `burst`: how often it may do so at once. `interval_s`:
    seconds after which once more is allowed."""

    def __init__(self, burst: int = BURST, interval_s: float = INTERVAL_S) -> None:
        self._burst = burst
        self._interval_s = interval_s
        self._free_at: dict[Hashable, float] = {}  # when all that was counted is forgotten (seconds)
        self._sweep_at = SWEEP_AT

    def note(self, identity: Hashable, what: str, now: float) -> None:
        """Note that `identity` attaches as somebody new. `what`: that identity in words.

        Raises:
            CallRefused: it has done so too often.
        """
        if self.is_too_often(identity, now):
            raise resource_exhausted(
                f"{what} has attached as a new process {self._burst} times within minutes: once in "
                f"{self._interval_s:g} s is allowed in the long run"
            )

    def is_too_often(self, identity: Hashable, now: float) -> bool:
        """Note what `identity` does, unless it has done so too often: that does not count."""
        if len(self._free_at) >= self._sweep_at:
            self._free_at = {key: at for key, at in self._free_at.items() if at > now}
            self._sweep_at = max(SWEEP_AT, 2 * len(self._free_at))
        free_at = max(self._free_at.get(identity, now), now) + self._interval_s
        if free_at - now > self._burst * self._interval_s:
            return True
        self._free_at[identity] = free_at
        return False


class AttachQueue:
    """One hello at each turn of the event loop, in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for this hello's turn. What else is ready in the event loop runs before the next one."""
        async with self._lock:
            await asyncio.sleep(0)


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


class UserCalls:
    """Counts the calls of each user for all nodes or all jobs, whose answers are large. `most`: of one user. `what`:
    for the message to a user who finds no place."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._under_way: Counter[int] = Counter()

    @contextmanager
    def one(self, uid: int) -> Iterator[None]:
        """Count one call for a block.

        Raises:
            CallRefused: the user has as many under way as one user may.
        """
        if self._under_way[uid] >= self._most:
            raise resource_exhausted(f"uid {uid} has {self._most} {self._what} under way, the most here: try again")
        self._under_way[uid] += 1
        try:
            yield
        finally:
            self._under_way[uid] -= 1
            if not self._under_way[uid]:
                del self._under_way[uid]
