"""What a sensor is, and how it is kept running.

A sensor is one file in `muster.daemon.node.sensors` with one method, `watch`, and one line of registration there. It
reads below the given paths, reports observations and samples, and judges nothing: the coordinator's policy table does.
A signal without a row in policy.toml has no effect, so a new sensor needs one. Missing hardware is no error: `watch`
returns. A sensor that fails is logged and started again, and harms nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muster.daemon.host.lasting_problem import LastingProblem
from muster.v1 import node_pb2

RESTART_S = 5.0
"""Seconds after a failure before the sensor is started again."""
MAX_TEXT_CHARS = 1000
OVER = "-over"
"""The end of a kind's name in an observation that a signal which lasted is over."""

_log = logging.getLogger(__name__)


def _nothing() -> None:
    """Nothing waits for the end of an observation."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed signal, as `Signal` in node.proto.

    `handled` is called when the coordinator has confirmed the observation, or when nothing follows from it.
    """

    kind: str
    code: int
    device: str
    text: str
    observed_s: float
    handled: Callable[[], None] = field(default=_nothing, compare=False, repr=False)

    def message(self) -> node_pb2.Signal:
        """The observation as a message."""
        return node_pb2.Signal(
            kind=self.kind,
            code=self.code,
            device=self.device,
            text=self.text[:MAX_TEXT_CHARS],
            observed_s=self.observed_s,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a condition that counts only when it lasts. The policy says how long.

    kind, code, device: as in `Observation`. held: the part of the time since the sample before, 0 to 1, in which the
    condition held. at: monotonic seconds. text: the reading in words.
    """

    kind: str
    code: int
    device: str
    held: float
    at: float
    text: str


Report = Callable[[Observation | Sample], None]


@dataclass(frozen=True, slots=True)
class SensorPaths:
    """What sensors read.

    kmsg: the kernel log, /dev/kmsg or a growing file in its place. kmsg_position: a file in memory of this boot that
    keeps the position in the log over a restart; None: it is not kept. nvidia_driver: a file that exists
    while the NVIDIA driver is loaded. nvml: NVIDIA's management library, a name that the loader finds, or a path. node:
    this node's name in Slurm. slurm_conf: where Slurm's slurm.conf may be; the first that exists is read. host_root:
    the folder that holds sys and proc.
    """

    kmsg: Path = Path("/dev/kmsg")
    kmsg_position: Path | None = None
    nvidia_driver: Path = Path("/proc/driver/nvidia/version")
    nvml: str = "libnvidia-ml.so.1"
    node: str = ""
    slurm_conf: tuple[Path, ...] = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))
    host_root: Path = Path("/")

    @property
    def boot_id(self) -> Path:
        """The file with the kernel's id of this boot."""
        return self.host_root / "proc/sys/kernel/random/boot_id"


class Sensor(Protocol):
    """Watches one thing."""

    name: str

    async def watch(self, report: Report) -> None:
        """Report observations as they appear. Return if this node has nothing to watch."""
        ...


async def run_sensor(sensor: Sensor, report: Report, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Run a sensor until it returns. After a failure, start it again after `RESTART_S` seconds."""
    while True:
        try:
            await sensor.watch(report)
            _log.info("sensor %s: nothing (more) to watch here", sensor.name)
            return
        except Exception:  # noqa: BLE001  # one sensor must not take the daemon down
            _log.exception("sensor %s failed, next try in %g s", sensor.name, RESTART_S)
        await pause(RESTART_S)


class UnreadableFiles:
    """Says in the log which files of one sensor can't be read: errors as long as they last, and once what the host does
    not have. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._problems: dict[str, LastingProblem] = {}
        self._absent: set[str] = set()

    def note(self, failed: Mapping[str, Mapping[str, str]], absent: Collection[str] = ()) -> None:
        """Take in one reading. failed: for each device, why its files could not be read. absent: files that no device
        of the kind must have."""
        for device in self._problems.keys() - failed.keys():
            self._problems.pop(device).end()
        for device, files in failed.items():
            words = ", ".join(f"{file} ({why})" for file, why in files.items())
            self._problem(device).meet(f"{device} can't be read: {words}")
        if missing := set(absent) - self._absent:
            self._absent |= missing
            _log.info("this host does not report %s", ", ".join(sorted(missing)))

    def _problem(self, device: str) -> LastingProblem:
        return self._problems.setdefault(device, LastingProblem(_log, f"{device} is read again", self._now))
