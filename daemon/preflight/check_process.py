"""Runs the node check in a process of its own, with a deadline. A check that hangs is killed, and that is its result.

The process of a check that hangs in a driver can outlive its SIGKILL. Nobody waits for it longer than KILL_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import muster
from muster.daemon.host.kept_memory_client import SOCKET
from muster.daemon.preflight import gpu_counters, processor_wait
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.node_check import COMMAND

DEADLINE_S = 60.0
"""Seconds for a whole check. With PyTorch and without GPUs it takes 3 s (measured). The rest is for more hardware, and
for a shared file system that is new to the node."""
MOST_WAIT_FOR_CORES_S = 120.0
"""Seconds by which a deadline grows at most, because the check had to wait for cores. A check that hangs does not wait
for one."""
KILL_TIMEOUT_S = 2.0
"""Seconds that a check has to end once it is killed, or has closed its output."""
_PART_CHARS = 100


def command(interpreter: Sequence[str]) -> list[str]:
    """The command line of the program. `interpreter`: a Python interpreter and its flags."""
    root = str(Path(next(iter(muster.__path__))).parent)
    return [*interpreter, "-c", COMMAND, root]


async def run_check(
    argv: Sequence[str],
    environment: Mapping[str, str],
    work_dir: str = "",
    deadline_s: float = DEADLINE_S,
    started: Callable[[int], None] = lambda pid: None,
    musterd: str = SOCKET,
) -> CheckResult:
    """Run the program with this command line, and return its result, with the error counters of the GPUs before and
    after. `started` is called with its pid. `musterd`: the socket of this node's musterd."""
    before = await gpu_counters.read(musterd)
    result = await _run_program(argv, environment, work_dir, deadline_s, started)
    after = await gpu_counters.read(musterd, after=time.monotonic()) if before else before
    return dataclasses.replace(result, counters=gpu_counters.describe(before, after))


async def _run_program(
    argv: Sequence[str],
    environment: Mapping[str, str],
    work_dir: str,
    deadline_s: float,
    started: Callable[[int], None],
) -> CheckResult:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            cwd=work_dir or None,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        return CheckResult(Outcome.FAILED, f"the node check can't be started: {error.strerror}")
    started(process.pid)
    output = _Output()
    reading = asyncio.ensure_future(output.read(process))
    try:
        ended = await _ends_in_time(process.pid, reading, deadline_s)
        if ended and output.result is None:
            await _wait_briefly(process)  # to learn its exit status
    finally:
        reading.cancel()
        await _kill(process)
    if output.result is not None:
        return output.result
    if not ended:
        return CheckResult(Outcome.SILENT, f"the node check did not answer within {deadline_s:g} s, in {output.part}")
    return CheckResult(Outcome.FAILED, f"the node check has ended with {process.returncode}, in {output.part}")


async def _ends_in_time(pid: int, reading: asyncio.Future[None], deadline_s: float) -> bool:
    """Whether all output of the process has come. The process gets back the time for which it had to wait for a core:
    others used the cores, which proves nothing against the node."""
    allowed_s = waited_s = 0.0
    while (more_s := deadline_s + waited_s - allowed_s) > 0:
        allowed_s += more_s
        done, _ = await asyncio.wait({reading}, timeout=more_s)
        if done:
            reading.result()
            return True
        waited_s = min(processor_wait.waited_s(pid), MOST_WAIT_FOR_CORES_S)
    return False


class _Output:
    """What the program has printed: its result, once it is there, and the last line. Libraries may print others."""

    def __init__(self) -> None:
        self.result: CheckResult | None = None
        self._line = ""

    @property
    def part(self) -> str:
        """Which part of the check has begun, in quotes."""
        return repr(self._line[:_PART_CHARS] or "the start")

    async def read(self, process: asyncio.subprocess.Process) -> None:
        """Read until the result has come, or the program has closed its output."""
        assert process.stdout is not None
        while self.result is None and not process.stdout.at_eof():
            with suppress(ValueError):  # no result, or a line that is too long to be the program's own
                self._line = (await process.stdout.readline()).decode(errors="replace").strip() or self._line
                self.result = CheckResult.from_json(self._line)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await _wait_briefly(process)


async def _wait_briefly(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await process.wait()
