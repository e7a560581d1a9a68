"""The user's hooks, [hooks] of job.toml: programs that are told what happens to the job.

The batch process starts them, because it sees the job's view all the time, is the user's own and outlives all ranks. A
hook is a process beside it, in run_dir, whose output goes where that of the batch script goes. Nothing waits for one
but the end of the job. A program goes on after the SIGTERM with which Slurm ends a run that is requeued, as long as
Slurm lets it.

The message is that of the site's hooks (docs/operations/hooks.md). What happens while no coordinator answers is told
once it does. What a run of the job has not told before it ends, or loses its first node, is not told.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

from muster.daemon.agent.batch.run_summary import SeesView
from muster.daemon.agent.batch.srun import ALL_LAUNCHED
from muster.daemon.host import clock
from muster.v1.api_pb2 import BatchRef, GangView, RecoveryView
from muster.v1.common_pb2 import JobHook

FORMAT = 1
"""The version of the message: daemon/coordinator/hooks/messages.py has the same."""
Occasion = Literal["swap", "restart", "requeue", "failure", "end"]
MOST_WAITING = 16
"""Messages that wait for one hook. More are dropped."""
REQUEUE_WAIT_S = 3.0
"""Seconds for which a run that is requeued waits for its hooks: its next run waits for its end."""
KILL_WAIT_S = 1.0
_IN_RUN_DIR = 'trap "" TERM INT; cd "$1" && shift && exec "$@"'
"""In a shell, because a folder on storage that hangs would let the process hang that starts another one in it."""
_log = logging.getLogger(__name__)


class Hooked:
    """Passes the views of `coordinator` on, and tells `hooks` what has changed."""

    def __init__(self, coordinator: SeesView, hooks: Sequence[JobHook], run_dir: str) -> None:
        self._coordinator, self._run_dir = coordinator, run_dir
        self._queues = [HookQueue(hook, run_dir) for hook in hooks]
        self._before: GangView | None = None

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> Any:
        """See SeesView."""
        view = await self._coordinator.view(launch)
        if self._queues and isinstance(view, GangView):
            for message in messages(self._before, view, clock.wall()):
                for one in self._queues:
                    one.put(message)
            was_over, self._before = self._before is not None and self._before.final, view
            if view.final and not was_over:
                await asyncio.gather(*(one.close(is_over(view)) for one in self._queues))
        return view


def is_over(view: GangView) -> bool:
    """The job is over, and not only this run of it."""
    return view.phase in ("DONE", "FAILED", "CANCELLED")


class HookQueue:
    """One hook: its program is executed for one message after another."""

    def __init__(self, hook: JobHook, run_dir: str) -> None:
        self._hook, self._run_dir = hook, run_dir
        self._waiting: list[dict[str, Any]] = []
        self._work: asyncio.Task[None] | None = None

    def put(self, message: dict[str, Any]) -> None:
        """Queue `message`, if the hook wants it. Never waits."""
        if message["occasion"] not in self._hook.on:
            return
        if len(self._waiting) >= MOST_WAITING:
            _log.warning("hook %s is too slow: it is not told of a %s", self._hook.name, message["occasion"])
            return
        self._waiting.append(message | {"id": uuid.uuid4().hex, "hook": self._hook.name})
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._execute_all())

    async def close(self, job_is_over: bool) -> None:
        """Wait for what is queued: for the hook's timeout if the job is over, else shortly. Then its program ends."""
        if self._work is None:
            return
        await asyncio.wait([self._work], timeout=self._hook.timeout_s if job_is_over else REQUEUE_WAIT_S)
        self._work.cancel()
        with suppress(asyncio.CancelledError):
            await self._work

    async def _execute_all(self) -> None:
        while self._waiting:
            await execute(self._hook, self._waiting.pop(0), self._run_dir)


async def execute(hook: JobHook, message: dict[str, Any], run_dir: str) -> None:
    """Execute the hook's program with `message` on its standard input. Whatever fails is said in the log."""
    environ = {**os.environ, "MUSTER_HOOK": hook.name, "MUSTER_OCCASION": message["occasion"]}
    argv = ("/bin/sh", "-c", _IN_RUN_DIR, "hook", run_dir, *hook.command)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, env=environ, start_new_session=True
        )
    except OSError as error:
        _log.warning("hook %s can't be started: %s", hook.name, error.strerror)
        return
    try:
        async with asyncio.timeout(hook.timeout_s):
            await process.communicate(json.dumps(message).encode())
    except TimeoutError:
        _log.warning("hook %s had not ended after %g s, and is killed", hook.name, hook.timeout_s)
    else:
        if process.returncode:
            _log.warning("hook %s ended with status %d", hook.name, process.returncode)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):  # a dead file server may keep it
                async with asyncio.timeout(KILL_WAIT_S):
                    await process.wait()


def messages(before: GangView | None, view: GangView, at: float) -> Iterator[dict[str, Any]]:
    """What has happened between two views of a job. `before`: None: `view` is the first one that this run sees, so what
    it shows of earlier times is old."""
    told = _newest_start(before if before is not None else view)
    for recovery in view.recoveries:
        if recovery.started_s and recovery.generation > told:
            swap = recovery.action in ("swap", "planned swap")
            text = f"generation {recovery.generation} starts: {recovery.action}: {recovery.cause}"
            yield _message("swap" if swap else "restart", view, at, text, recovery)
    if view.phase == "REQUEUED" and before is not None and before.phase != "REQUEUED":
        yield _message("requeue", view, at, f"the job is requeued: {view.reason}")
    if view.final and is_over(view) and not (before is not None and before.final):
        text = f"the job is {view.phase} with exit code {view.exit_code}: {view.reason or 'done'}"
        yield _message("failure" if view.phase == "FAILED" else "end", view, at, text)


def _newest_start(view: GangView) -> int:
    return max((recovery.generation for recovery in view.recoveries if recovery.started_s), default=0)


def _message(
    occasion: Occasion, view: GangView, at: float, text: str, recovery: RecoveryView | None = None
) -> dict[str, Any]:
    details: dict[str, Any] = {
        "gang": view.gang_id,
        "name": view.name,
        "owner_uid": view.owner_uid,
        "phase": view.phase,
        "generation": view.generation,
        "exit_code": view.exit_code if is_over(view) else None,
        "nodes": list(dict.fromkeys(rank.node for rank in view.ranks)),
    }
    if recovery is not None:
        details["recovery"] = {
            "action": recovery.action,
            "cause": recovery.cause,
            "nodes_out": list(recovery.nodes_out),
            "nodes_in": list(recovery.nodes_in),
            "detected_at": recovery.detected_s,
            "started_at": recovery.started_s,
            "step_before": recovery.step_before,
            "step_restored": recovery.step_restored,
        }
    job = view.slurm_job_ids[0] if view.slurm_job_ids else 0
    return {
        "format": FORMAT, "occasion": occasion, "at": at, "text": text, "job": job, "node": "", "details": details,
    }  # fmt: skip
