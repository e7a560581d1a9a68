"""How an agent ends: what it works on until then, what gives it its exit code, and how its ranks stop before.

An order or a dismissal ends it. After SIGTERM it follows the coordinator's orders; without one it winds down by itself.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.v1.common_pb2 import JobSpec

log = logging.getLogger(__name__)

# Seconds for which an agent without orders waits for its ranks to stop.
_RANK_EXIT_TIMEOUT_S = 12.0
_POLL_S = 0.05
_EXIT_SIGTERM = 128 + signal.SIGTERM
_SIGTERM_NOTICE = "Slurm has sent SIGTERM: the job's time limit, a preemption, a requeue or scancel"
INTERRUPTED = "the launch was interrupted (SIGINT, as Ctrl-C sends it)"


@dataclass(frozen=True, slots=True)
class Ending:
    """With which code the agent exits, whether it leaves the memory of its ranks to the job's next run, and whether the
    whole job is over."""

    exit_code: int
    keep_memory: bool = False
    job_over: bool = False


class Lifetime:
    """What one agent works on, and its ending. Only the first ending counts.

    ended: the ending, or the error of a vital task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def end(self, exit_code: int, reason: str, *, keep_memory: bool = False, job_over: bool = False) -> None:
        """Leave. `reason` is logged."""
        if not self.ended.done():
            log.info("leaving with exit code %d: %s", exit_code, reason)
            self.ended.set_result(Ending(exit_code, keep_memory, job_over))

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


class WindDown:
    """The end of one agent's ranks, and of the agent if no order comes.

    Args:
        notice_s: seconds for which the agent waits for an order after SIGTERM.
        self_fence: kills this node's ranks, for the reason given.
        stop_ranks: asks them, for the reason given, to finish their step, keep their state and exit.
        deposit_memory: gives their state to the job's next run.
        status_changed: called when the coordinator must know.

    notice: what Slurm has said of the job's end; empty: nothing.
    failure: why the agent leaves without an order; empty: it does not.
    """

    def __init__(
        self,
        spec: JobSpec,
        notice_s: float,
        self_fence: Callable[[str], None],
        supervisor: RankSupervisor,
        stop_ranks: Callable[[str], None],
        deposit_memory: Callable[[], Coroutine[Any, Any, None]],
        lifetime: Lifetime,
        status_changed: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._notice_s = notice_s
        self._self_fence = self_fence
        self._supervisor = supervisor
        self._stop_ranks = stop_ranks
        self._deposit_memory = deposit_memory
        self._lifetime = lifetime
        self._status_changed = status_changed
        self._stop_requested = asyncio.Event()
        self._stop_completed = False
        self.notice = ""
        self.failure = ""

    def on_sigterm(self, notice: str = _SIGTERM_NOTICE) -> None:
        """SIGTERM has come: report it and follow the coordinator's orders. Without an order, wind down."""
        if not self.notice and not self._lifetime.ended.done():
            self.notice = notice
            log.warning(notice)
            self._status_changed()
            self._lifetime.start(self._wind_down_without_order(), vital=True)

    def request_stop(self, reason: str) -> None:
        """Ask the ranks, once, to finish their step and exit."""
        if self._stop_requested.is_set():
            return
        self._stop_requested.set()
        self._stop_ranks(reason)
        if self._spec.stop_signal:
            self._supervisor.signal_ranks(self._spec.stop_signal)

    def on_ranks_changed(self) -> None:
        """When the last rank has stopped, deposit its memory now: what follows may last longer than Slurm allows, and
        SIGKILL must not lose the memory."""
        if self._stop_requested.is_set() and not self._stop_completed and not self._supervisor.any_alive():
            self._stop_completed = True
            self._lifetime.start(self._deposit_memory())

    async def _wind_down_without_order(self) -> None:
        try:
            async with asyncio.timeout(self._notice_s):
                await self._stop_requested.wait()
        except TimeoutError:
            await self._wind_down()

    async def _wind_down(self) -> None:
        self.failure = self.notice
        self._status_changed()
        self.request_stop(self.failure)
        if self._spec.stop_signal or self._spec.memory_checkpoint:
            await self._wait_for_ranks()
        self._self_fence(self.failure)
        await self._wait_for_ranks()
        # No order has written the memory or ended the job.
        self._lifetime.end(_EXIT_SIGTERM, self.failure, keep_memory=True)

    async def _wait_for_ranks(self) -> None:
        deadline = asyncio.get_running_loop().time() + _RANK_EXIT_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            if not self._supervisor.any_alive():
                return
            await asyncio.sleep(_POLL_S)
