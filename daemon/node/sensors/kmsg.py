"""Sensor: errors of GPUs, NVSwitches and the host in the kernel log, as soon as the record appears.

Where the position in the log is kept (`log_position`), a restarted daemon goes on after the last error that was
handled, and reports what came meanwhile. Otherwise, and at the first start in a boot, only records after the start are
reported: older ones were handled before, or belong to a repaired node. They are counted, and the newest is logged.
Drivers print one fault several times, so the same code of the same device within a second is one observation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from muster.daemon.host import clock
from muster.daemon.node.kernel.kernel_errors import KernelErrors
from muster.daemon.node.kernel.kernel_log import open_kernel_log
from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord
from muster.daemon.node.kernel.log_position import LogPosition
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.daemon.node.sensors.sensor import Observation, Report, SensorPaths

MAX_AGE_S = 600.0
"""Seconds after which an error that no daemon has seen is not judged any more: somebody may have mended its cause. In
public field data (Kokolis et al., 2410.21680) a failure is put down to a signal of the 10 minutes before."""
_log = logging.getLogger(__name__)


class KernelLogSensor:
    """Watches the kernel log at `roots.kmsg`. `now`: the clock of the records, seconds since the boot."""

    name = "kernel log"

    def __init__(self, roots: SensorPaths, now: Callable[[], float] = clock.monotonic) -> None:
        self._roots = roots
        self._now = now
        self._position: LogPosition | None = None
        self._errors = KernelErrors()

    @property
    def not_understood(self) -> int:
        """Messages in this boot's kernel log that tell of errors of NVIDIA's driver and could not be read."""
        return self._errors.not_understood

    @property
    def driver_lines(self) -> Mapping[str, int]:
        """For each driver: its lines that speak of trouble and were not understood."""
        return dict(self._errors.lines.counts)

    @property
    def newest_driver_line(self) -> str:
        """The newest of these lines; empty: there was none."""
        return self._errors.lines.last

    async def watch(self, report: Report) -> None:
        """See Sensor.watch."""
        log = open_kernel_log(self._roots.kmsg)
        if log is None:
            return
        with log:
            errors, position = KernelErrors(), self._kept_position()
            self._errors = errors
            _begin(log.existing_records(), position, errors, report, self._now())
            async for record in log.follow():
                error, line = errors.read(record, self._now())
                if error:
                    _log.warning("hardware error: %s", error.text)
                    report(observation(error, clock.wall(), position.begin(record.sequence)))
                elif line:
                    _log.info("a driver speaks of trouble in words that Muster does not know: %s", line)

    def _kept_position(self) -> LogPosition:
        """The position of this process: observations of an earlier `watch` may still wait for the coordinator."""
        if self._position is None:
            self._position = LogPosition(self._roots.kmsg_position, self._roots.boot_id)
        return self._position


def _begin(
    existing: list[KernelRecord], position: LogPosition, errors: KernelErrors, report: Report, now: float
) -> None:
    """Report what an earlier daemon has not handled; without its position, nothing."""
    handled = position.load()
    if handled is None:
        _log_old_errors(existing)
    else:
        _report_missed(existing, handled, position, errors, report, now)
    position.start_after(max((record.sequence for record in existing if record.sequence is not None), default=-1))


def _report_missed(
    existing: list[KernelRecord],
    handled: int,
    position: LogPosition,
    errors: KernelErrors,
    report: Report,
    now: float,
) -> None:
    wall = clock.wall()
    for record in existing:
        at = now if record.at is None else min(record.at, now)
        error, _ = errors.read(record, at)
        if error is None or record.sequence is None or record.sequence <= handled:
            continue
        if now - at > MAX_AGE_S:
            _log.warning("hardware error %.0f s ago, too old to be judged now: %s", now - at, error.text)
        else:
            _log.warning("hardware error %.0f s ago, not handled before: %s", now - at, error.text)
            report(observation(error, wall - (now - at), position.begin(record.sequence)))


def observation(error: KernelError, observed_s: float, handled: Callable[[], None] = lambda: None) -> Observation:
    """The report of an error that was seen at this time. `handled`: as in Observation."""
    return Observation(error.kind, error.code, error.device, error.text, observed_s, handled)


def _log_old_errors(records: list[KernelRecord]) -> None:
    parser = KernelErrorParser()
    old = [error for record in records if (error := parser.parse(record))]
    if old:
        _log.warning("the kernel log holds %d GPU errors from before the start; the newest: %s", len(old), old[-1].text)
