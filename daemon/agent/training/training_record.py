"""Samples how the training goes on this node, for the agent's status, and keeps the series of the node in its file.

The ranks notice nothing of it: a sample reads their pages. The file is on shared storage, which may hang, so it is
read and written in a thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from muster.checkpoint.store.rank_samples import RankSamples
from muster.daemon.agent.training.node_training import NodeSamples
from muster.daemon.host import clock, metric_series
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.host.metric_series import NodeSeries
from muster.daemon.host.worker_threads import run_in_own_thread
from muster.v1.agent_pb2 import NodeTraining

log = logging.getLogger(__name__)

SAMPLE_S = 2.0
"""Seconds between two samples, and so between two changes of the status."""
STATUS_WITHIN_S = 5.0
"""Seconds within which a change is reported, if no status goes before."""
WRITE_S = (5.0, 60.0)
"""Seconds between two writes of the file: a tenth of the time since the agent's start, between these."""

Pause = Callable[[float], Awaitable[None]]


class TrainingRecord:
    """Of one agent.

    Args:
        run_dir, gang, node: whose file it is.
        ranks: how many the whole job has.
        samples: of this node's ranks.
        generation: the one that runs now.
        schedule_status: called with the seconds within which the status is to be sent.
    """

    def __init__(
        self,
        run_dir: str,
        gang: str,
        node: str,
        ranks: int,
        samples: RankSamples,
        generation: Callable[[], int],
        schedule_status: Callable[[float], None],
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._run_dir, self._gang, self._node, self._ranks = run_dir, gang, node, ranks
        self._samples, self._generation = samples, generation
        self._schedule_status, self._pause = schedule_status, pause
        self._of_generation = NodeSamples(0)
        self._series: NodeSeries | None = None
        self._problem = LastingProblem(log, "the series of this node is written again")
        self._unwritten = False
        self.status: NodeTraining | None = None
        """What the agent's status says of the running generation; None: nothing is known."""

    async def run(self) -> None:
        """Sample and write until cancelled."""
        writing = asyncio.ensure_future(self._write_often())
        try:
            while True:
                await self._pause(SAMPLE_S)
                self.sample(clock.wall())
        finally:
            writing.cancel()

    def sample(self, at_s: float) -> None:
        """Look at the ranks now (seconds since the epoch)."""
        if (generation := self._generation()) != self._of_generation.generation:
            self._of_generation = NodeSamples(generation)
        status = self._of_generation.add(self._samples.take(), at_s, self._series)
        self._unwritten |= status is not None
        if status != self.status:
            self.status = status
            self._schedule_status(STATUS_WITHIN_S)

    async def close(self) -> None:
        """Take a last sample, and write it."""
        self.sample(clock.wall())
        await self._write()

    async def _write_often(self) -> None:
        began = clock.monotonic()
        read = partial(metric_series.read_node, self._run_dir, self._gang, self._node)
        series = await run_in_own_thread(read, "muster-series")
        series.most_bins = metric_series.bins_of(self._ranks)
        self._series = series
        while True:
            await self._pause(min(WRITE_S[1], max(WRITE_S[0], (clock.monotonic() - began) / 10)))
            await self._write()

    async def _write(self) -> None:
        if self._series is None or not self._unwritten:
            return
        self._unwritten = False
        text = metric_series.as_text(self._series)
        write = partial(metric_series.write_text, self._run_dir, self._gang, self._node, text)
        try:
            await run_in_own_thread(write, "muster-series")
        except OSError as error:
            self._problem.meet(f"the series of this node can't be written: {error}")
        else:
            self._problem.end()
