"""Sensor: errors of GPUs, NVSwitches and the host in the kernel log, as soon as the record appears.

Only records after the start are reported. Older ones were handled before, or belong to a repaired node: they are
counted, and the newest is logged. Drivers print one fault several times, so the same code of the same device within a
second is one observation.
"""

from __future__ import annotations

import logging

from muster.daemon.host import clock
from muster.daemon.node.kernel.kernel_error import KernelError
from muster.daemon.node.kernel.kernel_errors import KernelErrors
from muster.daemon.node.kernel.kernel_log import open_kernel_log
from muster.daemon.node.kernel.kernel_record import KernelRecord
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.daemon.node.sensors.sensor import Observation, Report, SensorPaths

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
            errors = KernelErrors()
            async for record in log.follow():
                if error := errors.new_error(record, clock.monotonic()):
                    _log.warning("hardware error: %s", error.text)
                    report(observation(error, clock.wall()))


def observation(error: KernelError, observed_s: float) -> Observation:
    """The report of an error that was seen at this time."""
    return Observation(error.kind, error.code, error.device, error.text, observed_s)


def _log_old_errors(records: list[KernelRecord]) -> None:
    parser = KernelErrorParser()
    old = [error for record in records if (error := parser.parse(record))]
    if old:
        _log.warning("the kernel log holds %d GPU errors from before the start; the newest: %s", len(old), old[-1].text)
