"""Live logging of a run's numbers ([record] live of job.toml), on the node that carries rank 0.

The numbers are those that the agent samples anyway: the ranks notice nothing. A process of its own writes them
(live_writer). It is started with the first number, and again at most once a minute after it has ended. A line that it
does not take at once is dropped, so nothing waits for it, but for the agent's end, shortly.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import muster
from muster.daemon.agent.training.training_record import SAMPLE_S
from muster.daemon.host import clock
from muster.v1.agent_pb2 import NodeTraining
from muster.v1.common_pb2 import JobSpec

log = logging.getLogger(__name__)
START_AGAIN_S = 60.0
END_WAIT_S = 3.0
"""Seconds that the end of the job waits for the last numbers."""
REQUEUE_WAIT_S = 1.0
"""The same for the end of an agent whose job goes on."""
KILL_WAIT_S = 1.0
MOST_UNREAD_BYTES = 1 << 20
_EXEC = 'exec "$@"'
"""In a shell, because an interpreter on storage that hangs would let the agent hang that starts it."""
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from muster.daemon.agent.training import live_writer as writer; writer.main()"
)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What is written, and with what. `head`: the first line that the writer gets. `interpreter`: the user's."""

    head: Mapping[str, Any]
    interpreter: Sequence[str]
    environment: Mapping[str, str]


def live_run(spec: JobSpec, gang: str, job: int, interpreter: Sequence[str], environment: Mapping[str, str]) -> LiveRun:
    """What the job asks for."""
    default = f"{spec.run_dir}/tensorboard/{gang}" if spec.live.tool == "tensorboard" else ""
    head = {
        "tool": spec.live.tool,
        "to": spec.live.to or default,
        "experiment": environment.get("MLFLOW_EXPERIMENT_NAME", "muster"),
        "gang": gang,
        "job": job,
        "name": spec.name,
        "params": dict(spec.live.params),
    }
    return LiveRun(head, interpreter, environment)


class LiveNumbers:
    """The live numbers of one agent.

    Args:
        run: None: nothing is logged.
        training: what this node's ranks have said last; None: nothing.
        carries_rank_0: whether rank 0 runs here.
    """

    def __init__(
        self,
        run: LiveRun | None,
        training: Callable[[], NodeTraining | None],
        carries_rank_0: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._run, self._training, self._carries_rank_0, self._pause = run, training, carries_rank_0, pause
        self._writer: asyncio.subprocess.Process | None = None
        self._not_before = 0.0
        self._written: dict[str, tuple[int, int]] = {}
        """By name: the generation and the step that were written last."""

    async def run(self) -> None:
        """Write what is new until cancelled."""
        while self._run is not None:
            await self._pause(SAMPLE_S)
            await self.sample(clock.wall())

    async def sample(self, at_s: float) -> None:
        """Write what is new now (seconds since the epoch)."""
        said = self._training()
        if self._run is None or said is None or not self._carries_rank_0():
            return
        new = [one for one in said.numbers if self._written.get(one.name) != (said.generation, one.step)]
        if not new or (stdin := await self._stdin(self._run)) is None:
            return
        self._written |= {one.name: (said.generation, one.step) for one in new}
        rows = [[one.name, one.step, one.ranks, one.least, one.median, one.greatest] for one in new]
        _send(stdin, {"at": at_s, "numbers": rows})

    async def close(self, status: str = "") -> None:
        """End the writer, which writes what it has. `status`: how the job has ended; empty: it goes on."""
        if (writer := self._writer) is None or writer.stdin is None or writer.returncode is not None:
            return
        if status:
            _send(writer.stdin, {"status": status})
        writer.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S if status else REQUEUE_WAIT_S):
                await writer.wait()
        if writer.returncode is None:
            writer.stdin.transport.abort()
            with suppress(ProcessLookupError):
                writer.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await writer.wait()

    async def _stdin(self, run: LiveRun) -> asyncio.StreamWriter | None:
        """Of the writer, which is started if there is none; None: it can't be."""
        if self._writer is None or self._writer.returncode is not None:
            if clock.monotonic() < self._not_before:
                return None
            self._not_before = clock.monotonic() + START_AGAIN_S
            root = str(Path(next(iter(muster.__path__))).parent)
            try:
                self._writer = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", _EXEC, "live", *run.interpreter, "-c", _COMMAND, root),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    env=dict(run.environment),
                    cwd="/",
                )
            except OSError as error:
                log.warning("the live numbers of this run can't be written: %s", error.strerror)
                return None
            if self._writer.stdin is not None:
                _send(self._writer.stdin, run.head)
        return self._writer.stdin


def _send(stdin: asyncio.StreamWriter, line: Mapping[str, Any]) -> None:
    """Without a wait. It is dropped if the writer has ended, or has not read for long."""
    if not stdin.is_closing() and stdin.transport.get_write_buffer_size() < MOST_UNREAD_BYTES:
        stdin.write(json.dumps(line).encode() + b"\n")
