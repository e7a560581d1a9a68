"""From an agent's start to its exit code: the tasks that it works on, and what ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """With which code the agent exits, and whether it leaves the memory of its ranks to the job's next run."""

    exit_code: int
    keep_memory: bool


class Lifetime:
    """Of one agent. Only the first ending counts.

    ended: the ending, or the error of a vital task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def end(self, exit_code: int, reason: str, *, keep_memory: bool = False) -> None:
        """Leave. `reason` is logged."""
        if not self.ended.done():
            log.info("leaving with exit code %d: %s", exit_code, reason)
            self.ended.set_result(Ending(exit_code, keep_memory))

    def start(self, work: Coroutine[Any, Any, Any], *, vital: bool = False) -> asyncio.Task[Any]:
        """Start a task. If a `vital` task fails, that is a bug: it ends the agent and its ranks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_ended, vital))
        return task

    def cancel_tasks(self) -> None:
        """Cancel all that still works."""
        for task in list(self._tasks):
            task.cancel()

    def _task_ended(self, vital: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not vital:
            log.error("%s", error, exc_info=error)
        elif not self.ended.done():
            self.ended.set_exception(error)
