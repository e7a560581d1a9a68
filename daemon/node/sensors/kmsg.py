"""Sensor: GPU and NVSwitch errors in the kernel log, the moment the line appears.

Only lines that come after the start are signals: what stands in the log already has been dealt with, or is
history of a repaired node; it is counted and its newest line logged. The same code of the same device
within a second is one observation (drivers print one fault several times).
"""

from __future__ import annotations

import logging

from muster.daemon.host import clock
from muster.daemon.node.sensors.kernel_log import open_kernel_log
from muster.daemon.node.sensors.sensor import Observation, Report, SensorPaths
from muster.daemon.node.sensors.xid import KernelError, KernelLineParser

REPEAT_S = 1.0
_log = logging.getLogger(__name__)


class KernelLogSensor:
    """Watches `roots.kmsg`."""

    name = "kernel log"

    def __init__(self, roots: SensorPaths) -> None:
        self._path = roots.kmsg

    async def watch(self, report: Report) -> None:
        """See Sensor.watch."""
        log = open_kernel_log(self._path)
        if log is None:
            return
        with log:
            _look_back(log.existing_lines())
            reader, recent = KernelLineParser(), RecentErrors()
            async for line in log.follow():
                sighting = reader.parse(line)
                if sighting and recent.is_new(sighting, clock.monotonic()):
                    _log.warning("seen: %s", sighting.text)
                    report(_observation(sighting))


class RecentErrors:
    """What was seen within the last second, so that it is reported once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], float] = {}

    def is_new(self, sighting: KernelError, now: float) -> bool:
        """Whether this is not a repetition; `now` in seconds, monotonic."""
        self._seen = {key: at for key, at in self._seen.items() if now - at < REPEAT_S}
        key = (sighting.kind, sighting.code, sighting.device)
        if key in self._seen:
            return False
        self._seen[key] = now
        return True


def _observation(sighting: KernelError) -> Observation:
    return Observation(sighting.kind, sighting.code, sighting.device, sighting.text, clock.wall())


def _look_back(lines: list[str]) -> None:
    reader = KernelLineParser()
    old = [sighting for line in lines if (sighting := reader.parse(line))]
    if old:
        _log.warning(
            "%d GPU errors stand in the kernel log since before the start; the newest: %s", len(old), old[-1].text
        )
