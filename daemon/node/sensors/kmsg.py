"""Sensor: GPU and NVSwitch errors in the kernel log, as soon as the record appears.

Only records after the start are reported. Older ones were handled before, or belong to a repaired node: they are
counted, and the newest is logged. Drivers print one fault several times, so the same code of the same device within a
second is one observation.
"""

from __future__ import annotations

import logging

from muster.daemon.host import clock
from muster.daemon.node.kernel.kernel_log import open_kernel_log
from muster.daemon.node.kernel.kernel_record import KernelRecord
from muster.daemon.node.kernel.xid import KernelError, KernelErrorParser
from muster.daemon.node.sensors.sensor import Observation, Report, SensorPaths

REPEAT_S = 1.0
"""Seconds within which an equal error is a repetition."""
_log = logging.getLogger(__name__)


class KernelLogSensor:
    """Watches the kernel log at `roots.kmsg`."""

    name = "kernel log"

    def __init__(self, roots: SensorPaths) -> None:
        self._path = roots.kmsg

    async def watch(self, report: Report) -> None:
        """See Sensor.watch."""
        log = open_kernel_log(self._path)
        if log is None:
            return
        with log:
            _log_old_errors(log.existing_records())
            parser, recent = KernelErrorParser(), RecentErrors()
            async for record in log.follow():
                error = parser.parse(record)
                if error and recent.is_new(error, clock.monotonic()):
                    _log.warning("hardware error: %s", error.text)
                    report(_observation(error))


class RecentErrors:
    """The errors of the last REPEAT_S seconds, so that each is reported once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], float] = {}

    def is_new(self, error: KernelError, now: float) -> bool:
        """Whether this is no repetition. `now`: monotonic seconds."""
        self._seen = {key: at for key, at in self._seen.items() if now - at < REPEAT_S}
        key = (error.kind, error.code, error.device)
        if key in self._seen:
            return False
        self._seen[key] = now
        return True


def _observation(error: KernelError) -> Observation:
    return Observation(error.kind, error.code, error.device, error.text, clock.wall())


def _log_old_errors(records: list[KernelRecord]) -> None:
    parser = KernelErrorParser()
    old = [error for record in records if (error := parser.parse(record))]
    if old:
        _log.warning("the kernel log holds %d GPU errors from before the start; the newest: %s", len(old), old[-1].text)
