"""Steps of this host's wall clock: by hand, or by a time service that corrects it at once.

No deadline of Muster depends on the wall clock. Credentials and certificates do: hosts whose clocks differ refuse each
other's calls. So the log of the host whose clock was set says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NoReturn

from muster.daemon.host import clock

NOTED_S = 5.0
"""Seconds from which a step is logged. A tenth of what credentials allow; time services correct less without a step."""
CHECK_S = 5.0
"""Seconds between two looks of `run`."""
_log = logging.getLogger(__name__)


def wall_offset() -> float:
    """Seconds by which the wall clock is ahead of the time since this host was started."""
    return clock.wall() - clock.boottime()


class ClockSteps:
    """Compares the wall clock with a clock that nobody sets. `offset`: by how many seconds it is ahead of that one."""

    def __init__(self, offset: Callable[[], float] = wall_offset) -> None:
        self._offset = offset
        self._before = offset()

    def note(self) -> None:
        """Look, and log a step since the last look."""
        now = self._offset()
        step_s, self._before = now - self._before, now
        if abs(step_s) > NOTED_S:
            _log.warning(
                "the wall clock of %s was set by %+.0f s. Open streams and deadlines are not affected. Until the "
                "clocks of all hosts agree, new calls between hosts are refused: see to the time service (NTP)",
                os.uname().nodename,
                step_s,
            )

    async def run(self, interval_s: float = CHECK_S) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.note()
