"""Sensor: NVIDIA GPUs through NVIDIA's management library, all of them once a second.

The library runs in a process of its own (`nvml_process`), because its calls can hang for minutes on a dying GPU. A call
that hangs is a sample of its own kind. The reader is then replaced, and leaves that GPU out for a time that doubles
with each hang, so that the others are still read. A node without the NVIDIA driver has no reader: the sensor looks for
the driver's file now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from muster.daemon.host import clock
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.node.nvml.gpu_counters import GpuCounters
from muster.daemon.node.nvml.gpu_identities import GpuIdentities
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings, NvmlProcess, ReaderEnded, ReaderHung
from muster.daemon.node.sensors.gpu_conditions import HANG, GpuConditions
from muster.daemon.node.sensors.gpu_samples import describe
from muster.daemon.node.sensors.sensor import Report, Sample, SensorPaths
from muster.daemon.node.sensors.slurm_gres import NodeGres

PERIOD_S = 1.0
"""Seconds from one reading to the next."""
ABSENT_S = 10.0
"""Seconds between two looks for the driver. A look costs one system call."""
EMPTY_S = 60.0
"""Seconds until a driver without GPUs is asked again. A start of the reader costs 0.1 s of processor time."""
FIRST_RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
"""Seconds until a reader that ended or hung is replaced, and until a GPU whose calls hung is read again: doubled each
time. A call that hangs may hold locks of the driver that the job needs as well."""
NOT_REPORTED = frozenset({3, 13})
"""NVML's return codes of what a GPU or a driver never reports: not supported, no such function."""
_log = logging.getLogger(__name__)


class GpuReader(Protocol):
    """Reads all GPUs of the node (nvml_process.NvmlProcess)."""

    async def read(self, leave_out: Collection[str]) -> GpuReadings: ...
    async def close(self) -> None: ...


@dataclass(slots=True)
class _Retry:
    """When something is tried again, and how long the wait for that is."""

    at: float
    wait_s: float


class Retries:
    """Waits that double, for each GPU by its device; "" stands for the reader itself."""

    def __init__(self) -> None:
        self._retries: dict[str, _Retry] = {}

    def failed(self, device: str, now: float) -> float:
        """Note a failure. Returns the seconds to wait."""
        before = self._retries.get(device)
        wait_s = min(before.wait_s * 2, LONGEST_RETRY_S) if before else FIRST_RETRY_S
        self._retries[device] = _Retry(now + wait_s, wait_s)
        return wait_s

    def worked(self, device: str) -> None:
        """Forget the failures."""
        self._retries.pop(device, None)

    def waiting(self, now: float) -> set[str]:
        """The devices that are not to be tried yet."""
        return {device for device, retry in self._retries.items() if device and now < retry.at}


class NvmlSensor:
    """Watches the GPUs. `reader`, `now` (monotonic seconds) and `pause` are the process and the clock."""

    name = "NVML"

    def __init__(
        self,
        paths: SensorPaths,
        reader: GpuReader | None = None,
        now: Callable[[], float] = clock.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._driver = paths.nvidia_driver
        self._reader = reader or NvmlProcess(paths.nvml)
        self._now = now
        self._pause = pause
        self._conditions = GpuConditions()
        self.counters = GpuCounters()
        self._gres = NodeGres(paths.node, paths.slurm_conf)
        self.gpus = GpuIdentities()
        self._retries = Retries()
        self._unreadable = UnreadableGpus(now)
        self._ended = LastingProblem(_log, "GPUs are read", now)

    async def watch(self, report: Report) -> None:
        """See Sensor.watch. Never returns: a driver may be loaded later."""
        try:
            while True:
                await self._pause(await self._read(report) if self._driver.exists() else await self._rest(ABSENT_S))
        finally:
            await self._reader.close()

    async def _rest(self, wait_s: float) -> float:
        self.counters.forget()
        self.gpus.forget()
        await self._reader.close()
        return wait_s

    async def _read(self, report: Report) -> float:
        """Read the GPUs once. Returns the seconds until the next time."""
        began = self._now()
        try:
            readings = await self._reader.read(self._retries.waiting(began))
        except ReaderHung as hung:
            return self._note_hang(hung, report)
        except (ReaderEnded, OSError) as error:
            self._ended.meet(f"no GPU can be read: {error}")
            return self._retries.failed("", self._now())
        self._ended.end()
        self._take_in(readings, report)
        if not readings.count:
            return await self._rest(EMPTY_S)
        return max(0.0, began + PERIOD_S - self._now())

    def _take_in(self, readings: GpuReadings, report: Report) -> None:
        now = self._now()
        self._unreadable.note(readings.gpus)
        self.counters.note(readings.gpus, now)
        for device in ("", *(gpu.device for gpu in readings.gpus if gpu.device)):
            self._retries.worked(device)
            report(Sample(HANG, 0, device, 0.0, now, "NVML answers"))
        self.gpus.note(readings.gpus, readings.count)
        for sample in self._conditions.samples(readings, now, self._gres.gpus()):
            report(sample)

    def _note_hang(self, hung: ReaderHung, report: Report) -> float:
        now = self._now()
        wait_s = self._retries.failed(hung.device, now)
        where = f"the GPU at {hung.device}" if hung.device else "the driver"
        _log.warning("NVML hangs (%s): %s; next try in %g s", where, hung, wait_s)
        report(Sample(HANG, 0, hung.device, 1.0, now, f"NVML hangs ({where}): {hung}"))
        return PERIOD_S if hung.device else wait_s


class UnreadableGpus:
    """Says in the log what can't be read: errors as long as they last, and once what a GPU never reports."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._problems: dict[int, LastingProblem] = {}
        self._not_reported: set[str] = set()

    def note(self, gpus: list[GpuReading]) -> None:
        """Take in the GPUs of one answer."""
        for gpu in gpus:
            errors = {name: code for name, code in gpu.failed.items() if code not in NOT_REPORTED}
            if errors:
                words = ", ".join(f"{name} (NVML error {code})" for name, code in errors.items())
                self._problem(gpu.index).meet(f"{describe(gpu)} can't be read: {words}")
            elif gpu.whole and gpu.index in self._problems:
                self._problems.pop(gpu.index).end()
            if missing := {name for name, code in gpu.failed.items() if code in NOT_REPORTED} - self._not_reported:
                self._not_reported |= missing
                _log.info("%s does not report %s", describe(gpu), ", ".join(sorted(missing)))

    def _problem(self, index: int) -> LastingProblem:
        return self._problems.setdefault(index, LastingProblem(_log, f"GPU {index} is read again", self._now))
