"""Invariants 3 and 4 for batch processes, which start the agents.

No batch process is given up while it may live, and no gang waits for one that has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.gathering import (
    BATCH_SILENCE_S,
    BATCH_TIMEOUT_S,
    RUNS_WITHOUT_START,
    SPARE_WAIT_S,
)
from muster.daemon.coordinator.core.recovery.requeueing import are_most_silent
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

MAX_DELAY_S = 6.0
"""Seconds. A batch process that has ended with its host is given up at most this much later than possible."""


class BatchProcessInvariant:
    """Since when each gang gathers. The world's jobs record when each batch process was heard."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._gathering_since: dict[str, float] = {}

    def gathering_begins(self, gang: str, at: float) -> None:
        """The gang expects agents from now on. Slurm may have started them earlier, while the last run was flushed."""
        self._gathering_since[gang] = at

    def check_requeue(self, core: Core, fact: facts.SlurmCallOwed, at: float) -> None:
        """The batch process is not given up too early, and not only because the gather timeout is over."""
        gang, seen = core.state.gangs[fact.gang], core.observed.gang(fact.gang)
        # Slurm may have started the job again, unknown to the core: it gives up the process of the run that it knows.
        silent_s = at - self._world.jobs.batch_heard_at.get((fact.job, gang.slurm.restart_count), 0.0)
        if ReasonPhrase.BATCH_PROCESS_SILENT in fact.text:
            require(
                silent_s >= BATCH_TIMEOUT_S,
                f"invariant 3: a batch process is given up {silent_s:.1f} s after it was heard",
            )
            return
        _, granted_at = seen.job_running or (0, 0.0)
        began_at = max(granted_at, self._gathering_since.get(fact.gang, 0.0))
        unchanged_s = at - max(seen.last_attach_at, began_at, core.observed.observing_since)
        heard = seen.batch is not None and seen.batch.is_of(fact.job, gang.slurm.restart_count)
        # While the agent on the batch host is attached, the batch process can't have ended with its host.
        host_attached = gang.roster.batch_host is not None and seen.is_attached(gang.roster.batch_host.node)
        late = (
            heard
            and not host_attached
            and silent_s > BATCH_TIMEOUT_S + MAX_DELAY_S
            and unchanged_s > SPARE_WAIT_S + MAX_DELAY_S
        )
        late = late and not are_most_silent(Turn(core.state, core.observed, core.index, at), gang.slurm)
        require(
            not late, f"invariant 4: {gang.id} has waited {silent_s:.1f} s for agents, and its batch process is silent"
        )

    def check_gather_failure(self, gang: Gang, at: float) -> None:
        """A gang fails because its nodes did not attach.

        A batch process that was heard within BATCH_SILENCE_S may live for all that the core can know.
        """
        heard_at = self._world.jobs.batch_heard_at.get((gang.slurm.job, gang.slurm.restart_count))
        job = self._world.jobs.running_job(gang.id)
        may_requeue = (
            gang.spec.requeue and not self._world.limits.observe and gang.slurm.runs_without_start < RUNS_WITHOUT_START
        )
        require(
            not may_requeue
            or job is None
            or job.restart_count != gang.slurm.restart_count
            or self._world.jobs.has_batch_process(job)
            or (heard_at is not None and at - heard_at <= BATCH_SILENCE_S),
            f"invariant 4: {gang.id} fails because its nodes did not attach, and its batch process has ended with its "
            f"host",
        )
