"""Sensor: the host itself, once a second, from /sys and /proc: memory errors, throttling CPUs, file systems, use.

A thread reads, with a deadline: the disk of a folder may not answer. What the host does not have is no error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from muster.daemon.host import clock
from muster.daemon.node.sensors.host_conditions import HostConditions
from muster.daemon.node.sensors.sensor import Report, Sample, SensorPaths, UnreadableFiles
from muster.daemon.node.sysfs.host_files import HostFiles, HostReading
from muster.daemon.node.sysfs.reader_thread import ReaderThread, ReadHangs

PERIOD_S = 1.0
"""Seconds from one reading to the next."""
DEADLINE_S = 3.0
"""Seconds that a reading may take. Shorter than the longest gap between samples that counts (signal_windows)."""
HANG, HOST_FILES = "sysfs-hang", 2
"""The kind and the code of a read that hangs."""


class HostSensor:
    """Watches the host below `paths.host_root`. `now` (monotonic seconds) and `pause` are the clock."""

    name = "host"

    def __init__(
        self,
        paths: SensorPaths,
        files: HostFiles | None = None,
        now: Callable[[], float] = clock.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        files = files or HostFiles(paths.host_root)
        self._reader: ReaderThread[HostReading] = ReaderThread(files.read, deadline_s)
        self._now = now
        self._pause = pause
        self._conditions = HostConditions()
        self._unreadable = UnreadableFiles(now)

    async def watch(self, report: Report) -> None:
        """See Sensor.watch. Never returns."""
        try:
            while True:
                await self._pause(await self._read(report))
        finally:
            self._reader.close()

    async def _read(self, report: Report) -> float:
        """Read the host once. Returns the seconds until the next time."""
        began = self._now()
        try:
            reading = await self._reader.read()
        except ReadHangs as hang:
            report(Sample(HANG, HOST_FILES, "", 1.0, self._now(), f"the host's files: {hang}"))
            return PERIOD_S
        now = self._now()
        report(Sample(HANG, HOST_FILES, "", 0.0, now, "the host's files answer"))
        self._unreadable.note({"the host": reading.failed} if reading.failed else {}, reading.absent)
        for sample in self._conditions.samples(reading, now):
            report(sample)
        return max(0.0, began + PERIOD_S - self._now())
