"""Look-ups in Slurm that verify a caller: jobs, and the nodes' addresses.

Look-ups of the same job at the same time share one call: when a coordinator restarts, every agent of every gang
attaches at once. An answer is reused for a second. A caller is rejected only on an answer that is newer than the
caller's request. If Slurm doesn't answer, the call is retried for a while. Then the answer is Unknown, which never
counts as no.

A caller chooses what is looked up, so each user has a limited number of look-ups that are not answered yet, and so have
all users together. Above a limit the answer is Unknown at once: the caller tries again. Few calls are made at the same
time, for the waiting users in turn.

The name of a node is looked up in the roster first. A name that the roster lacks never costs a call of its own: the
roster is refreshed, at most every few seconds, whatever the number of names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host import clock
from muster.slurm.client.types import GONE, Gone, Job, Node, Slurm, Unknown

RETRY_FOR_S = 30.0
"""Seconds for which a call that Slurm doesn't answer is retried before the answer is Unknown."""

MAX_CALLS = 8
"""Calls at the same time. Each is a process of 20 ms (measured with scontrol), or waits for the one pyslurm worker."""
MAX_UNANSWERED = 2048
"""Look-ups of all users that are not answered yet."""
MAX_UNANSWERED_OF_USER = 128
"""Look-ups of one user that are not answered yet. Agents of one job share one."""
ROSTER_VALID_S = 5.0
"""Seconds for which the roster is believed to hold every node: a node that is new in slurm.conf waits so long."""

_ANSWER_VALID_S = 1.0
_RETRY_INTERVAL_S = 0.5
_ANSWER_KEPT_S = 300.0

_T = TypeVar("_T")


class SlurmLookup:
    """Look-ups with shared, short-lived answers."""

    def __init__(
        self,
        slurm: Slurm,
        roster: SlurmRoster | None = None,
        retry_for_s: float = RETRY_FOR_S,
        roster_valid_s: float = ROSTER_VALID_S,
    ) -> None:
        """`roster`: the coordinator's own; None: a new one."""
        self._slurm = slurm
        self._roster = roster or SlurmRoster(slurm)
        self._retry_for_s = retry_for_s
        self._roster_valid_s = roster_valid_s
        self._calls: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self._queue = FairQueue(MAX_CALLS)
        self._unanswered: Counter[int] = Counter()

    async def job(self, job: int, uid: int, *, since: float | None = None) -> Job | Gone | Unknown:
        """The job, by a call that began no earlier than `since` (monotonic seconds; None: a second ago).

        `uid`: the user who wants to know it.
        """

        async def call() -> Job | Gone | Unknown:
            found = await self._slurm.jobs([job])
            return found if isinstance(found, Unknown) else found.get(job, GONE)

        return await self._shared(("job", job), call, since or clock.monotonic() - _ANSWER_VALID_S, uid)

    async def node(self, node: str, uid: int, *, since: float | None = None) -> Node | Gone | Unknown:
        """The node: as the roster has it, which may be a minute old, or with `since` as in `job`.

        Gone: the roster, which is ROSTER_VALID_S old at most, does not have the node.
        """
        if node not in self._roster.nodes:
            await self._roster.refresh_if_older(self._roster_valid_s)
        if node not in self._roster.nodes:
            return self._absent()
        if since is None:
            return self._roster.nodes[node]

        async def call() -> Node | Gone | Unknown:
            found = await self._slurm.nodes([node])
            return found if isinstance(found, Unknown) else found.get(node, GONE)

        return await self._shared(("node", node), call, since, uid)

    def _absent(self) -> Gone | Unknown:
        """The answer for a node that the roster lacks."""
        if self._roster.age_s() <= ROSTER_VALID_S:
            return GONE
        return Unknown(self._roster.unknown or "Slurm does not say which nodes it has now")

    async def _shared(
        self, key: object, call: Callable[[], Awaitable[_T | Unknown]], since: float, uid: int | None
    ) -> _T | Unknown:
        """The answer of `call`, or of one with the same `key` that is not older than `since`. It counts for `uid`."""
        called_at, task = self._calls.get(key, (0.0, None))
        if task is None or called_at < since or _failed(task):
            if uid is not None and (refused := self._refusal(uid)):
                return Unknown(refused)
            called_at, task = clock.monotonic(), self._start(uid, call)
            self._calls[key] = (called_at, task)
            self._drop_old_answers(called_at)
        answer: _T | Unknown = await asyncio.shield(task)
        return answer

    def _refusal(self, uid: int) -> str:
        """Why `uid` gets no further look-up now; empty: a place is free."""
        if self._unanswered[uid] >= MAX_UNANSWERED_OF_USER:
            return f"{MAX_UNANSWERED_OF_USER} look-ups for uid {uid} are not answered yet: try again"
        if self._unanswered.total() >= MAX_UNANSWERED:
            return f"{MAX_UNANSWERED} look-ups are not answered yet: try again"
        return ""

    def _start(self, uid: int | None, call: Callable[[], Awaitable[_T | Unknown]]) -> asyncio.Task[Any]:
        """Start a look-up, which counts for `uid` until it is answered. None: it counts for nobody."""
        if uid is None:
            return asyncio.create_task(self._call_with_retries(call))

        async def queued() -> _T | Unknown:
            async with self._queue.place(uid):
                return await call()

        def forget(_: object) -> None:
            self._unanswered[uid] -= 1
            if not self._unanswered[uid]:
                del self._unanswered[uid]

        self._unanswered[uid] += 1
        task = asyncio.create_task(self._call_with_retries(queued))
        task.add_done_callback(forget)
        return task

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
            if task.done() and now - called_at > _ANSWER_KEPT_S:
                del self._calls[key]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or isinstance(task.result(), Unknown))
