"""One sensor on a clock of its own, with rules that turn its samples into signals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from muster.daemon.node.sensors.sensor import Observation, Sample, Sensor
from muster.daemon.node.signal_windows import SignalRule, SignalWindows


class WatchedSensor:
    """Time passes with `seconds` only. Give the sensor `now` and `pause` as its clock."""

    def __init__(self, rules: Iterable[SignalRule]) -> None:
        self.at = 1000.0
        self.samples: list[Sample] = []
        self.signals: list[Observation] = []
        self.pauses: list[float] = []
        """Each pause that the sensor has asked for, in seconds."""
        self._pausing = asyncio.Event()
        self._ticks: asyncio.Queue[None] = asyncio.Queue()
        self._windows = SignalWindows(self.signals.append, wall=lambda: 7.0)
        self._windows.use(rules)

    def now(self) -> float:
        """The time in seconds."""
        return self.at

    async def pause(self, seconds: float) -> None:
        """Wait for the next second, whatever the sensor asks for."""
        self.pauses.append(seconds)
        self._pausing.set()
        await self._ticks.get()

    async def seconds(self, count: int) -> list[str]:
        """Let so many seconds pass. Returns the signals of that time, such as "rdma-port 1 mlx5_0/1"."""
        before = len(self.signals)
        for _ in range(count):
            self._pausing.clear()
            self.at += 1.0
            self._ticks.put_nowait(None)
            await self._pausing.wait()
        return [f"{signal.kind} {signal.code} {signal.device}".strip() for signal in self.signals[before:]]

    def _report(self, reported: Observation | Sample) -> None:
        assert isinstance(reported, Sample)
        self.samples.append(reported)
        self._windows.report(reported)


@asynccontextmanager
async def watching(
    rules: Iterable[SignalRule], make: Callable[[WatchedSensor], Sensor]
) -> AsyncIterator[WatchedSensor]:
    """Run the sensor that `make` returns, and yield it after its first reading."""
    watched = WatchedSensor(rules)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(make(watched).watch(watched._report))
        await watched._pausing.wait()
        yield watched
        task.cancel()
