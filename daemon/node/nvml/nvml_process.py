"""The reader process of the NVML sensor: its start, its answers within a deadline, its end.

At most one reader lives. One that hangs inside the driver may outlive its SIGKILL for as long as the driver does not
return. Until it has ended, no other one is started, so that readers can't fill the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from muster.daemon.host import clock

READER = Path(__file__).with_name("nvml_reader.py")
START_TIMEOUT_S = 60.0
"""Seconds for the first answer. Without the persistence daemon the driver initialises each GPU first."""
READ_TIMEOUT_S = 10.0
"""Seconds for each further line of an answer. On a healthy GPU it takes milliseconds."""
STALL_S = 1.0
"""Seconds by which a wait may last longer than it was to. Beyond that this process has not run, and the reader neither:
that a node was frozen says nothing about its GPUs."""
KILL_TIMEOUT_S = 2.0
"""Seconds that a killed reader has to end. Then it hangs in the driver."""


Link = tuple[int, int | None, int | None, int | None, int | None]
"""One NVLink: 1 while it is active; replays, recoveries, CRC errors, failed recoveries since the driver started."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What one GPU reports; None: it could not be read, and `failed` has NVML's return code by the reading's name.

    device: the PCI address as in the kernel log, empty if it could not be read. whole: whether the slow readings were
    taken (from `slowdown_c` on); if not, they are None without an entry in `failed`. reasons: the clock event reasons,
    a bit mask. The counters `*_ns` grow while clocks are held down for that cause. margin_c: degrees until the GPU is
    too hot, negative above; slowdown_margin_c: the margin at which it slows down. ecc_*: uncorrected errors since the
    driver started. recovery_action: NVML's number of what the driver asks for, 0 for nothing.

    slowdown_c: the temperature at which it slows down, for GPUs without a margin. remapped: rows remapped for corrected
    and for uncorrected errors, whether a remap is pending, whether one failed. pcie: generation, the highest possible
    one, lanes, most possible lanes. fabric: NVML's state of the registration (3: done), its result, the cluster's id,
    the clique, the health mask.
    memory: bytes used, and of how many. busy_percent: of the last moment, with a kernel on it.
    """

    index: int
    device: str
    uuid: str = ""
    name: str = ""
    whole: bool = True
    reasons: int | None = None
    thermal_violation_ns: int | None = None
    board_limit_ns: int | None = None
    reliability_ns: int | None = None
    power_brake_ns: int | None = None
    temperature_c: int | None = None
    margin_c: int | None = None
    slowdown_margin_c: int | None = None
    power_mw: int | None = None
    ecc_uncorrected: int | None = None
    ecc_dram: int | None = None
    ecc_sram: int | None = None
    recovery_action: int | None = None
    slowdown_c: int | None = None
    remapped: tuple[int, int, int, int] | None = None
    retirement_pending: int | None = None
    sram_over_threshold: bool | None = None
    mig: int | None = None
    pcie: tuple[int, int, int, int] | None = None
    pcie_replays: int | None = None
    links: tuple[Link, ...] | None = None
    fabric: tuple[int, int, str, int, int] | None = None
    memory: tuple[int, int] | None = None
    busy_percent: int | None = None
    failed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """One answer. `count`: how many GPUs the driver has."""

    count: int
    gpus: list[GpuReading]


class ReaderHung(Exception):
    """A call has not returned in time. `device`: which GPU it was about; empty if unknown."""

    def __init__(self, device: str, words: str) -> None:
        super().__init__(words)
        self.device = device


class ReaderEnded(Exception):
    """The reader has ended without an answer, or answers nonsense. The message says why."""


_READING = TypeAdapter(GpuReading)


class NvmlProcess:
    """Starts the reader when it is needed.

    `library`: the name or path of NVIDIA's library. `now`: monotonic seconds.
    """

    def __init__(
        self, library: str, start_timeout_s: float = START_TIMEOUT_S, now: Callable[[], float] = clock.monotonic
    ) -> None:
        self._library = library
        self._start_timeout_s = start_timeout_s
        self._now = now
        self._process: asyncio.subprocess.Process | None = None
        self._killed: asyncio.subprocess.Process | None = None

    async def read(self, leave_out: Collection[str], timeout_s: float = READ_TIMEOUT_S) -> GpuReadings:
        """Read all GPUs, except the devices `leave_out`. After an error the reader is gone.

        Raises:
            ReaderHung: no line came for `timeout_s` seconds (for `start_timeout_s` after the start).
            ReaderEnded: see there.
        """
        started = self._process is None
        process = self._process = self._process or await self._start()
        try:
            _send(process, leave_out)
            return await self._answer(process, self._start_timeout_s if started else timeout_s, timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _answer(self, process: asyncio.subprocess.Process, first_s: float, further_s: float) -> GpuReadings:
        gpus: list[GpuReading] = []
        device, allowed_s = "", first_s
        while True:
            line = await self._line_in_time(process, allowed_s, device)
            allowed_s = further_s
            match line:
                case {"reading": str(device)}:
                    pass
                case {"gpu": dict(reading)}:
                    gpus.append(_checked(reading))
                case {"count": int(count)}:
                    return GpuReadings(count, gpus)
                case {"unavailable": str(words)}:
                    raise ReaderEnded(words)
                case _:
                    raise ReaderEnded(f"the reader process answers {str(line)[:100]!r}")

    async def _line_in_time(self, process: asyncio.subprocess.Process, allowed_s: float, device: str) -> Any:
        line = asyncio.create_task(_next_line(process))
        try:
            while True:
                began = self._now()
                await asyncio.wait({line}, timeout=allowed_s)
                if line.done():
                    return line.result()
                if self._now() - began <= allowed_s + STALL_S:
                    raise ReaderHung(device, f"no answer for {allowed_s:g} s")
        finally:
            line.cancel()

    async def _start(self) -> asyncio.subprocess.Process:
        if self._killed and self._killed.returncode is None:
            raise ReaderHung("", f"the reader process {self._killed.pid} hangs in the driver and can't be killed")
        self._killed = None
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(READER), self._library, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def close(self) -> None:
        """End the reader, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        self._killed = process
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            pass


def _send(process: asyncio.subprocess.Process, leave_out: Collection[str]) -> None:
    assert process.stdin
    process.stdin.write(f"{json.dumps(sorted(leave_out))}\n".encode())


async def _next_line(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout
    try:
        line = await process.stdout.readline()
        if not line:
            raise ReaderEnded("the reader process has ended")
        return json.loads(line)
    except ValueError:
        raise ReaderEnded("the reader process answers no line of JSON") from None


def _checked(reading: dict[str, Any]) -> GpuReading:
    try:
        return _READING.validate_python(reading)
    except ValidationError as error:
        raise ReaderEnded(f"the reader process answers nonsense: {error.errors()[0]['msg']}") from None
