"""What /sys and /proc say of the host itself: memory errors, throttling of the CPUs, file systems, memory, load.

A value that can't be read is None or left out, and `failed` says why. No input makes this module fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from muster.daemon.node.sysfs.kernel_files import Unreadable, names, read_count, read_text

MEMORY_CONTROLLERS, CPUS = "sys/devices/system/edac/mc", "sys/devices/system/cpu"
MAX_CONTROLLERS, MAX_CPUS, MAX_PACKAGES = 64, 4096, 16
"""What a node has at most; more is not read."""
MAX_TABLE_BYTES = 2**20
"""Bytes of /proc/self/mountinfo, at most: a node with many containers has a thousand lines."""
DISKS = ("", "tmp", "var", "dev/shm")
"""Folders, below the root, whose file systems may fill up."""
READ_ONLY_OPTIONS = frozenset({"ro", "emergency_ro", "shutdown"})
"""Options of a file system that takes no more writes. ext4 shows the last two after errors."""
_MEMORY = re.compile(r"^(MemTotal|MemAvailable): +([0-9]{1,15}) kB$", re.MULTILINE)
_LOAD = re.compile(r"([0-9]{1,7}\.[0-9]{2}) ([0-9]{1,7}\.[0-9]{2}) [0-9. /]+")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./:+@-]{0,199}")


@dataclass(frozen=True, slots=True)
class MemoryController:
    """Errors that ECC could not correct, and those that it could, since boot."""

    name: str
    uncorrectable: int | None
    correctable: int | None


@dataclass(frozen=True, slots=True)
class CpuPackage:
    """How often and for how long a CPU package was throttled for heat, since boot."""

    name: str
    times: int | None
    throttled_ms: int | None


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system on a disk. `name`: where it is mounted, else its device number. `path`: where it is mounted."""

    number: str
    name: str
    path: str
    read_only: bool


@dataclass(slots=True)
class HostReading:
    """The host at one moment. available: the part of memory that programs can get. load: of the last minute, for each
    CPU. used: the used part of each disk, by its folder. `failed`: why a file could not be read, by its path.
    """

    controllers: list[MemoryController] = field(default_factory=list)
    packages: list[CpuPackage] = field(default_factory=list)
    file_systems: list[FileSystem] = field(default_factory=list)
    available: float | None = None
    load: float | None = None
    used: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


class HostFiles:
    """Reads the host below the folder `root`. `disk_usage`: the used part of the disk of a folder, 0 to 1."""

    def __init__(self, root: Path, disk_usage: Callable[[Path], float] | None = None) -> None:
        self._root = root
        self._disk_usage = disk_usage or used_part
        self._packages: dict[str, Path] | None = None

    def read(self) -> HostReading:
        """One reading of all."""
        reading = HostReading()
        for name in self._listed(reading, MEMORY_CONTROLLERS, r"mc[0-9]{1,3}", MAX_CONTROLLERS):
            folder = f"{MEMORY_CONTROLLERS}/{name}"
            counts = [self._count(reading, f"{folder}/{file}") for file in ("ue_count", "ce_count")]
            reading.controllers.append(MemoryController(name, *counts))
        self._read_packages(reading)
        if text := self._text(reading, "proc/meminfo"):
            memory = {name: int(number) for name, number in _MEMORY.findall(text)}
            if memory.get("MemTotal") and "MemAvailable" in memory:
                reading.available = min(1.0, memory["MemAvailable"] / memory["MemTotal"])
        if (text := self._text(reading, "proc/loadavg")) and (found := _LOAD.fullmatch(text)):
            reading.load = float(found[1]) / (os.cpu_count() or 1)
        if text := self._text(reading, "proc/self/mountinfo", MAX_TABLE_BYTES):
            reading.file_systems = parse_file_systems(text.split("\n"))
        self._read_disks(reading)
        return reading

    def _read_packages(self, reading: HostReading) -> None:
        """One CPU of each package stands for it, and is found at the first reading: a host has hundreds of CPUs."""
        if self._packages is None:
            self._packages = self._find_packages(reading)
        for name, folder in self._packages.items():
            path = f"{folder}/thermal_throttle/package_throttle"
            times = self._count(reading, f"{path}_count")
            reading.packages.append(CpuPackage(name, times, self._count(reading, f"{path}_total_time_ms")))

    def _find_packages(self, reading: HostReading) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for name in self._listed(reading, CPUS, r"cpu[0-9]{1,5}", MAX_CPUS):
            folder = Path(CPUS) / name
            if (self._root / folder / "thermal_throttle").is_dir():
                package = self._count(reading, f"{folder}/topology/physical_package_id")
                if package is not None and len(found) < MAX_PACKAGES:
                    found.setdefault(f"package{package}", folder)
        return found

    def _read_disks(self, reading: HostReading) -> None:
        for folder in DISKS:
            try:
                reading.used[f"/{folder}"] = self._disk_usage(self._root / folder)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    reading.failed[f"/{folder}"] = error.strerror or "unreadable"

    def _listed(self, reading: HostReading, folder: str, pattern: str, limit: int) -> list[str]:
        try:
            return names(self._root / folder, pattern, limit)
        except Unreadable as error:
            _note(reading, folder, error)
            return []

    def _count(self, reading: HostReading, path: str) -> int | None:
        try:
            return read_count(self._root / path)
        except Unreadable as error:
            _note(reading, path, error)
            return None

    def _text(self, reading: HostReading, path: str, limit: int = 2**16) -> str:
        try:
            return read_text(self._root / path, limit)
        except Unreadable as error:
            _note(reading, path, error)
            return ""


def used_part(folder: Path) -> float:
    """The used part of the folder's disk, 0 to 1, as df shows it: what only root may use counts as used.

    Raises:
        OSError: there is no such folder.
    """
    disk = os.statvfs(folder)
    used = disk.f_blocks - disk.f_bfree
    return used / (used + disk.f_bavail) if used + disk.f_bavail else 0.0


def parse_file_systems(lines: Iterable[str]) -> list[FileSystem]:
    """The file systems on disks in lines of /proc/PID/mountinfo, each once, at its shortest mount point.

    The options at a line's end are the file system's own: those in front of them may be the mount's alone, as the
    read-only ones of systemd's ProtectSystem. A loop device may hold an image of a user's, of which errors say nothing
    about the node (`muster.daemon.node.kernel.host_errors` leaves it out, too).
    """
    found: dict[str, FileSystem] = {}
    for line in lines:
        mount, dash, system = line.partition(" - ")
        fields, parts = mount.split(" "), system.split(" ")
        if not dash or len(fields) < 6 or len(parts) != 3:
            continue
        number, path, (kind, source, options) = fields[2], fields[4], parts
        if not source.startswith("/dev/") or source.startswith("/dev/loop") or kind.startswith("fuse"):
            continue
        if not re.fullmatch(r"\d{1,7}:\d{1,7}", number):
            continue
        name = path if _PLAIN_PATH.fullmatch(path) else number
        known = found.get(number)
        if known is None or len(path) < len(known.path):
            read_only = not READ_ONLY_OPTIONS.isdisjoint(options.split(","))
            found[number] = FileSystem(number, name, path, read_only)
    return list(found.values())


def _note(reading: HostReading, path: str, error: Unreadable) -> None:
    if error.missing:
        reading.absent.add(f"/{path}")
    else:
        reading.failed[f"/{path}"] = str(error)
