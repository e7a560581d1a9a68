"""Sensor: the ports of InfiniBand and RoCE adapters, all of them once a second, from /sys/class/infiniband.

A read of an adapter's counters asks its firmware, and may hang when the adapter dies. So a thread reads, with a
deadline; a read that hangs is a sample of its own kind. A node without such an adapter is looked at now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from muster.daemon.host import clock
from muster.daemon.node.sensors.infiniband_conditions import FabricConditions
from muster.daemon.node.sensors.sensor import Report, Sample, SensorPaths, UnreadableFiles
from muster.daemon.node.sysfs.infiniband_ports import FOLDER, FabricReading, read_ports
from muster.daemon.node.sysfs.kernel_files import Unreadable
from muster.daemon.node.sysfs.reader_thread import ReaderThread, ReadHangs

PERIOD_S = 1.0
"""Seconds from one reading to the next."""
ABSENT_S = 10.0
"""Seconds between two looks for adapters on a node that has none. A look costs one system call."""
DEADLINE_S = 3.0
"""Seconds that a reading may take. Shorter than the longest gap between samples that counts (signal_windows)."""
HANG, FABRIC_FILES = "sysfs-hang", 1
"""The kind and the code of a read that hangs."""


class InfinibandSensor:
    """Watches the ports below `paths.host_root`. `now` (monotonic seconds) and `pause` are the clock."""

    name = "InfiniBand"

    def __init__(
        self,
        paths: SensorPaths,
        now: Callable[[], float] = clock.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._reader: ReaderThread[FabricReading | None] = ReaderThread(lambda: read_ports(paths.host_root), deadline_s)
        self._now = now
        self._pause = pause
        self._conditions = FabricConditions()
        self._unreadable = UnreadableFiles(now)

    async def watch(self, report: Report) -> None:
        """See Sensor.watch. Never returns: an adapter's driver may be loaded later."""
        try:
            while True:
                await self._pause(await self._read(report))
        finally:
            self._reader.close()

    async def _read(self, report: Report) -> float:
        """Read the ports once. Returns the seconds until the next time."""
        began = self._now()
        try:
            reading = await self._reader.read()
        except ReadHangs as hang:
            report(Sample(HANG, FABRIC_FILES, "", 1.0, self._now(), f"/{FOLDER}: {hang}"))
            return PERIOD_S
        except Unreadable as error:
            self._unreadable.note({f"/{FOLDER}": {"the list": str(error)}})
            return PERIOD_S
        if reading is None and not self._conditions.knows_ports:
            return ABSENT_S
        self._take_in(reading or FabricReading([], {}), report)
        return max(0.0, began + PERIOD_S - self._now())

    def _take_in(self, reading: FabricReading, report: Report) -> None:
        now = self._now()
        report(Sample(HANG, FABRIC_FILES, "", 0.0, now, f"/{FOLDER} answers"))
        failed = {f"port {port.name}": port.failed for port in reading.ports if port.failed}
        failed |= {f"adapter {name}": {"ports": words} for name, words in reading.unlisted.items()}
        self._unreadable.note(failed, {f"an adapter's {file}" for port in reading.ports for file in port.absent})
        for sample in self._conditions.samples(reading, now):
            report(sample)
