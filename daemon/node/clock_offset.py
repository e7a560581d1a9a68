"""By how much this node's wall clock differs from the coordinator's: a sample a second, from the answers to heartbeats.

An answer carries the coordinator's time. The coordinator wrote it at some moment between heartbeat and answer, so the
difference is known to half of the time between these two. No deadline depends on wall clocks, but credentials do: hosts
whose clocks differ by a minute or more refuse each other's calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from muster.daemon.host import clock
from muster.daemon.node.sensors.sensor import Report, Sample

KIND, DIFFERS = "host-clock", 1
"""The kind and the code of the samples."""
MOST_S = 5.0
"""Seconds by which clocks may differ. Hosts with a time service differ by less than a tenth of a second; credentials
allow a minute (munge: five)."""
FRESH_S = 60.0
"""Seconds for which a difference is believed: longer than any interval between heartbeats."""
PERIOD_S = 1.0
"""Seconds from one sample to the next."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """This clock is ahead by `ahead_s`, give or take `doubt_s`. `at`: monotonic seconds."""

    ahead_s: float
    doubt_s: float
    at: float


class ClockOffset:
    """Keeps the newest difference. `now` (monotonic) and `wall` are this host's clocks."""

    def __init__(
        self,
        now: Callable[[], float] = clock.monotonic,
        wall: Callable[[], float] = clock.wall,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._now = now
        self._wall = wall
        self._pause = pause
        self._newest: _Difference | None = None

    def note(self, sent_at: float, coordinator_s: float) -> None:
        """An answer has just come. `sent_at`: monotonic seconds when the heartbeat was sent."""
        now = self._now()
        doubt_s = (now - sent_at) / 2
        self._newest = _Difference(self._wall() - doubt_s - coordinator_s, doubt_s, now)

    def sample(self) -> Sample | None:
        """What is known now; None: nothing."""
        now, newest = self._now(), self._newest
        if newest is None or now - newest.at > FRESH_S:
            return None
        differs = abs(newest.ahead_s) - newest.doubt_s > MOST_S
        words = f"this node's clock is {abs(newest.ahead_s):.1f} s {'ahead of' if newest.ahead_s > 0 else 'behind'}"
        return Sample(KIND, DIFFERS, "", float(differs), now, f"{words} the coordinator's")

    async def run(self, report: Report) -> NoReturn:
        """Report a sample a second, until cancelled."""
        while True:
            if sample := self.sample():
                report(sample)
            await self._pause(PERIOD_S)
