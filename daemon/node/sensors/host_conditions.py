"""What the readings of the host say: samples of conditions that may be signals.

Errors count when they are new: what the counters held when the daemon started is of the past. A file system that is
read-only from the start is meant to be so. What a user's job can cause (no memory left, a full disk, a high load) is a
kind of signal of its own, which the policy only records.
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.daemon.node.sensors.sensor import Sample
from muster.daemon.node.sysfs.counter_growth import CounterGrowth, Growth
from muster.daemon.node.sysfs.host_files import CpuPackage, FileSystem, HostReading, MemoryController
from muster.wording import counted

MEMORY, CPU, FILE_SYSTEM, USE = "host-memory", "cpu-throttle", "mount", "host-use"
"""The kinds of signals."""
UNCORRECTABLE, CORRECTABLE = 1, 2
"""The codes of `MEMORY`."""
HEAT = 1
"""The code of `CPU`."""
READ_ONLY = 1
"""The code of `FILE_SYSTEM`."""
LITTLE_MEMORY, FULL_DISK, HIGH_LOAD = 1, 2, 3
"""The codes of `USE`."""
LITTLE_MEMORY_PART, FULL_DISK_PART, HIGH_LOAD_PER_CPU = 0.02, 0.95, 4.0
"""Available part of memory; used part of a disk (Imbue, DeepOps); runnable tasks for each CPU."""
MOST_ERRORS_PER_S, MOST_THROTTLES_PER_S = 1e6, 1e6
"""A faster growth is a counter that jumps. Throttled time is counted in ms, and at once when a long throttling ends."""
_OFTEN_REMOUNTED = ("/boot", "/efi", "/usr", "/media", "/run/media")
"""Where administrators and updates make file systems read-only on purpose."""


class HostConditions:
    """Turns each reading into samples. Keeps the counters and the file systems of earlier readings."""

    def __init__(self) -> None:
        self._growths: dict[tuple[str, str], CounterGrowth] = {}
        self._writable: dict[str, int] = {}

    def samples(self, reading: HostReading, now: float) -> Iterator[Sample]:
        """The samples of one reading. `now`: monotonic seconds."""
        for controller in reading.controllers:
            yield from self._of_memory(controller, now)
        for package in reading.packages:
            yield from self._of_package(package, now)
        for system in reading.file_systems:
            yield from self._of_file_system(system, now)
        yield from _of_use(reading, now)

    def _grown(self, name: str, what: str, value: int | None, most_per_s: float, now: float) -> Growth | None:
        return self._growths.setdefault((name, what), CounterGrowth(most_per_s)).next(value, now)

    def _of_memory(self, controller: MemoryController, now: float) -> Iterator[Sample]:
        counts = {"uncorrectable": controller.uncorrectable, "correctable": controller.correctable}
        for code, (what, count) in zip((UNCORRECTABLE, CORRECTABLE), counts.items(), strict=True):
            growth = self._grown(controller.name, what, count, MOST_ERRORS_PER_S, now)
            if growth is not None:
                new = counted(growth.amount, f"new {what} error")
                words = f"memory controller {controller.name}: {new}, {count} since boot"
                yield Sample(MEMORY, code, controller.name, float(growth.amount > 0), now, words)

    def _of_package(self, package: CpuPackage, now: float) -> Iterator[Sample]:
        times = self._grown(package.name, "times", package.times, MOST_THROTTLES_PER_S, now)
        throttled_ms = self._grown(package.name, "throttled_ms", package.throttled_ms, MOST_THROTTLES_PER_S, now)
        if times is None and throttled_ms is None:
            return
        held = min(1.0, throttled_ms.per_s / 1000) if throttled_ms else 0.0
        if times and times.amount:
            held = 1.0
        yield Sample(CPU, HEAT, package.name, held, now, f"CPU {package.name} is throttled for heat")

    def _of_file_system(self, system: FileSystem, now: float) -> Iterator[Sample]:
        """Two readings in succession must have shown it writable."""
        if any(system.path == path or system.path.startswith(f"{path}/") for path in _OFTEN_REMOUNTED):
            return
        seen = self._writable.get(system.number, 0)
        if not system.read_only:
            self._writable[system.number] = min(seen + 1, 2)
        elif seen < 2:
            self._writable.pop(system.number, None)
            return
        words = f"the file system at {system.name} ({system.number})"
        yield Sample(FILE_SYSTEM, READ_ONLY, system.name, float(system.read_only), now, f"{words} is read-only")


def _of_use(reading: HostReading, now: float) -> Iterator[Sample]:
    if reading.available is not None:
        words = f"{reading.available:.1%} of memory are available"
        yield Sample(USE, LITTLE_MEMORY, "", float(reading.available < LITTLE_MEMORY_PART), now, words)
    for folder, used in reading.used.items():
        yield Sample(
            USE, FULL_DISK, folder, float(used > FULL_DISK_PART), now, f"the disk of {folder} is {used:.0%} full"
        )
    if reading.load is not None:
        words = f"the load is {reading.load:.1f} for each CPU"
        yield Sample(USE, HIGH_LOAD, "", float(reading.load > HIGH_LOAD_PER_CPU), now, words)
