"""How the ranks of a node are asked to stop, and how their agent leaves when Slurm ends the job."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.daemon.agent.lifetime import Lifetime
from muster.daemon.agent.memory_handover import MemoryHandover
from muster.daemon.agent.ordered_ranks import OrderedRanks
from muster.daemon.agent.ranks.rank_supervisor import RankSupervisor
from muster.v1.common_pb2 import JobSpec

log = logging.getLogger(__name__)

# Seconds for which an agent without orders waits for its ranks to stop.
_RANK_EXIT_TIMEOUT_S = 12.0
_POLL_S = 0.05
_EXIT_SIGTERM = 128 + signal.SIGTERM
_SIGTERM_NOTICE = "Slurm has sent SIGTERM: the job's time limit, a preemption, a requeue or scancel"


class WindDown:
    """The end of one agent's ranks, and of the agent if no order comes.

    Args:
        notice_s: seconds for which the agent waits for an order after SIGTERM.
        status_changed: called when the coordinator must know.

    notice: what Slurm has said of the job's end; empty: nothing.
    failure: why the agent leaves without an order; empty: it does not.
    """

    def __init__(
        self,
        spec: JobSpec,
        notice_s: float,
        ranks: OrderedRanks,
        supervisor: RankSupervisor,
        checkpoints: CheckpointService,
        handover: MemoryHandover,
        lifetime: Lifetime,
        status_changed: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._notice_s = notice_s
        self._ranks = ranks
        self._supervisor = supervisor
        self._checkpoints = checkpoints
        self._handover = handover
        self._lifetime = lifetime
        self._status_changed = status_changed
        self._stop_requested = asyncio.Event()
        self._stop_completed = False
        self.notice = ""
        self.failure = ""

    def on_sigterm(self) -> None:
        """SIGTERM has come: report it and follow the coordinator's orders. Without an order, wind down."""
        if not self.notice and not self._lifetime.ended.done():
            self.notice = _SIGTERM_NOTICE
            log.warning(self.notice)
            self._status_changed()
            self._lifetime.start(self._wind_down_without_order(), vital=True)

    def request_stop(self, reason: str) -> None:
        """Ask the ranks, once, to finish their step and exit."""
        if self._stop_requested.is_set():
            return
        self._stop_requested.set()
        self._checkpoints.stop_ranks(reason)
        if self._spec.stop_signal:
            self._supervisor.signal_ranks(self._spec.stop_signal)

    def on_ranks_changed(self) -> None:
        """When the last rank has stopped, deposit its memory now: what follows may last longer than Slurm allows, and
        SIGKILL must not lose the memory."""
        if self._stop_requested.is_set() and not self._stop_completed and not self._supervisor.any_alive():
            self._stop_completed = True
            self._lifetime.start(self._handover.deposit())

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
        self._ranks.self_fence(self.failure)
        await self._wait_for_ranks()
        # No order has written the memory or ended the job.
        self._lifetime.end(_EXIT_SIGTERM, self.failure, keep_memory=True)

    async def _wait_for_ranks(self) -> None:
        deadline = asyncio.get_running_loop().time() + _RANK_EXIT_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            if not self._supervisor.any_alive():
                return
            await asyncio.sleep(_POLL_S)
