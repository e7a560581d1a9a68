"""Starts and measures the processes of a site (`site`)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from benchmarks.load import private_munged, site
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
CLOCK_TICKS_PER_S = 100
LINE_BYTES = 1 << 20


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def memory_mib(pid: int, field: str) -> float:
    """A field of /proc/PID/status, in MiB: VmRSS now, VmHWM at the peak so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


_KEPT = ("signal", "judged", "decided", "lag_ms")


class Process:
    """One process of the site. `told`: the newest value of each key that it told. `lines`: all else that it told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.told: Counter[str] = Counter()
        self.lines: list[dict[str, float | str]] = []
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, module: str, *arguments: object) -> Process:
        """Start `python -m benchmarks.load.MODULE`."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", f"benchmarks.load.{module}", *map(str, arguments))
        started = cls(
            await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, limit=LINE_BYTES)
        )
        _started.append(started)
        return started

    async def _read(self) -> None:
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            found = json.loads(line)
            if not found.keys().isdisjoint(_KEPT):
                self.lines.append(found)
            else:
                for key, value in found.items():
                    self.told[key] = value
            self._changed.set()
        self._changed.set()

    async def wait_told(self, key: str) -> float:
        """Wait until the process has told a value that is not 0."""
        while not self.told[key]:
            if self._reading.done():
                raise RuntimeError(f"the process {self.pid} has ended")
            self._changed.clear()
            await self._changed.wait()
        return self.told[key]

    def say(self, line: str) -> None:
        """Write a line to the process."""
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())

    async def kill(self) -> None:
        """End the process as a crash does. One that has ended is left alone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def stop(self) -> None:
        """End the process in order."""
        assert self._process.stdin
        self._process.stdin.close()
        await self._process.wait()
        await self._reading


_started: list[Process] = []


@asynccontextmanager
async def made_site(folder: Path) -> AsyncIterator[tuple[site.Site, int]]:
    """A new site, and the process id of its munged (0: none). At the end, all its processes end."""
    found = site.Site.create(folder)
    with private_munged.private_munged(folder / "munge") if private_munged.MUNGED else nullcontext(None) as munged:
        try:
            yield found, munged[1] if munged else 0
        finally:
            for process in _started:
                await process.kill()
            _started.clear()


def count_evicted(folder: Path) -> int:
    """Nodes that were removed from their gang, or judged, as the journal in `folder` says."""
    journal = Journal(folder)
    journal.load()
    wanted = {stored_class(facts.MemberRemoved), stored_class(facts.NodeJudged)}
    position = count = 0
    while page := journal.history("", position, 10_000):
        position = page[-1].position
        count += sum(record.name in wanted for record in page)
    journal.close()
    return count
