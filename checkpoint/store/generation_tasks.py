"""The tasks of the checkpoint service, each on behalf of a generation: a fence cancels those of the generations that it
ends."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

NEVER_FENCED = 1 << 62
"""A generation above all others, for tasks that a fence must not cancel."""


class GenerationTasks:
    """The running tasks. `node`: named when one of them fails."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._tasks: dict[asyncio.Task[None], int] = {}

    def spawn(self, generation: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until its generation is fenced."""
        task = asyncio.create_task(work)
        self._tasks[task] = generation
        task.add_done_callback(self._on_done)
        return task

    def spawn_unfenced(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until `close`."""
        return self.spawn(NEVER_FENCED, work)

    def fence(self, generation: int) -> None:
        """Cancel the tasks of all generations up to this one."""
        for task, of in self._tasks.items():
            if of <= generation:
                task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the checkpoint service on %s failed", self._node, exc_info=error)
