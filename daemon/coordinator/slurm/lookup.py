"""What the services ask Slurm before they believe a caller: jobs, the nodes' addresses, the topology.

Questions asked at the same time for the same job are one question: when a coordinator restarts, every agent of every
gang attaches at once. Answers are used for a second; a caller is refused only on an answer younger than its own
request. Where Slurm doesn't answer, it is asked again for a while; then the answer is Unknown, never no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from muster.daemon.host import clock
from muster.slurm.client.types import GONE, Gone, Job, Node, Slurm, Topology, Unknown

PATIENCE_S = 30.0
"""How long Slurm is asked again before the answer is Unknown."""

_FRESH_S = 1.0
_PAUSE_S = 0.5
_TOPOLOGY_S = 300.0

_T = TypeVar("_T")


class SlurmLookup:
    """Shared, short-lived answers of one Slurm."""

    def __init__(self, slurm: Slurm, patience_s: float = PATIENCE_S) -> None:
        self._slurm = slurm
        self._patience_s = patience_s
        self._asked: dict[object, tuple[float, asyncio.Task[Any]]] = {}

    async def job(self, job: int, *, since: float | None = None) -> Job | Gone | Unknown:
        """The job, as Slurm answered a question put not before `since` (monotonic seconds; None: a second ago)."""

        async def ask() -> Job | Gone | Unknown:
            found = await self._slurm.jobs([job])
            return found if isinstance(found, Unknown) else found.get(job, GONE)

        return await self._shared(("job", job), ask, since or clock.monotonic() - _FRESH_S)

    async def node(self, node: str, *, since: float | None = None) -> Node | Gone | Unknown:
        """The node; as `job`."""

        async def ask() -> Node | Gone | Unknown:
            found = await self._slurm.nodes([node])
            return found if isinstance(found, Unknown) else found.get(node, GONE)

        return await self._shared(("node", node), ask, since or clock.monotonic() - _FRESH_S)

    async def leaf(self, node: str) -> str:
        """The leaf switch of `node`; empty where there is no topology or Slurm doesn't tell."""
        found = await self._shared("topology", self._slurm.topology, clock.monotonic() - _TOPOLOGY_S)
        return (found.leaf(node) or "") if isinstance(found, Topology) else ""

    async def _shared(self, key: object, ask: Callable[[], Awaitable[_T | Unknown]], since: float) -> _T | Unknown:
        asked_at, task = self._asked.get(key, (0.0, None))
        if task is None or asked_at < since or _failed(task):
            asked_at, task = clock.monotonic(), asyncio.create_task(self._patiently(ask))
            self._asked[key] = (asked_at, task)
            self._forget_old(asked_at)
        return await asyncio.shield(task)

    async def _patiently(self, ask: Callable[[], Awaitable[_T | Unknown]]) -> object:
        trying = AsyncRetrying(
            retry=retry_if_result(lambda answer: isinstance(answer, Unknown)),
            stop=stop_after_delay(self._patience_s),
            wait=wait_fixed(_PAUSE_S),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        return await trying(ask)

    def _forget_old(self, now: float) -> None:
        for key, (asked_at, task) in list(self._asked.items()):
            if task.done() and now - asked_at > _TOPOLOGY_S:
                del self._asked[key]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or isinstance(task.result(), Unknown))
