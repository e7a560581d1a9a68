"""Look-ups in Slurm that verify a caller: jobs, the nodes' addresses, the topology.

Look-ups of the same job at the same time share one call: when a coordinator restarts, every agent of every gang
attaches at once. An answer is reused for a second. A caller is rejected only on an answer that is newer than the
caller's request. If Slurm doesn't answer, the call is retried for a while. Then the answer is Unknown, which never
counts as no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from muster.daemon.host import clock
from muster.slurm.client.types import GONE, Gone, Job, Node, Slurm, Topology, Unknown

RETRY_FOR_S = 30.0
"""Seconds for which a call that Slurm doesn't answer is retried before the answer is Unknown."""

_ANSWER_VALID_S = 1.0
_RETRY_INTERVAL_S = 0.5
_TOPOLOGY_VALID_S = 300.0

_T = TypeVar("_T")


class SlurmLookup:
    """Look-ups with shared, short-lived answers."""

    def __init__(self, slurm: Slurm, retry_for_s: float = RETRY_FOR_S) -> None:
        self._slurm = slurm
        self._retry_for_s = retry_for_s
        self._calls: dict[object, tuple[float, asyncio.Task[Any]]] = {}

    async def job(self, job: int, *, since: float | None = None) -> Job | Gone | Unknown:
        """The job, by a call that began no earlier than `since` (monotonic seconds; None: a second ago)."""

        async def call() -> Job | Gone | Unknown:
            found = await self._slurm.jobs([job])
            return found if isinstance(found, Unknown) else found.get(job, GONE)

        return await self._shared(("job", job), call, since or clock.monotonic() - _ANSWER_VALID_S)

    async def node(self, node: str, *, since: float | None = None) -> Node | Gone | Unknown:
        """The node, by a call that began no earlier than `since`, as in `job`."""

        async def call() -> Node | Gone | Unknown:
            found = await self._slurm.nodes([node])
            return found if isinstance(found, Unknown) else found.get(node, GONE)

        return await self._shared(("node", node), call, since or clock.monotonic() - _ANSWER_VALID_S)

    async def leaf(self, node: str) -> str:
        """The leaf switch of `node`; empty if Slurm has no topology or doesn't answer."""
        found = await self._shared("topology", self._slurm.topology, clock.monotonic() - _TOPOLOGY_VALID_S)
        return (found.leaf(node) or "") if isinstance(found, Topology) else ""

    async def _shared(self, key: object, call: Callable[[], Awaitable[_T | Unknown]], since: float) -> _T | Unknown:
        called_at, task = self._calls.get(key, (0.0, None))
        if task is None or called_at < since or _failed(task):
            called_at, task = clock.monotonic(), asyncio.create_task(self._call_with_retries(call))
            self._calls[key] = (called_at, task)
            self._drop_old_answers(called_at)
        return await asyncio.shield(task)

    async def _call_with_retries(self, call: Callable[[], Awaitable[_T | Unknown]]) -> object:
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda answer: isinstance(answer, Unknown)),
            stop=stop_after_delay(self._retry_for_s),
            wait=wait_fixed(_RETRY_INTERVAL_S),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        return await retrying(call)

    def _drop_old_answers(self, now: float) -> None:
        for key, (called_at, task) in list(self._calls.items()):
            if task.done() and now - called_at > _TOPOLOGY_VALID_S:
                del self._calls[key]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or isinstance(task.result(), Unknown))
