"""Batch scripts, which start the agents: none is given up while it may live (law 3), or waited for in vain (law 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.gathering import BATCH_S, IN_VAIN, SPARE_WAIT_S
from muster.daemon.coordinator.core.recovery.requeueing import most_silent
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.turn import GangTurn, Turn
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

MAX_DELAY_S = 6.0
"""A batch script that has died with its host is given up so soon after it might have been."""


class BatchProcessInvariant:
    """No memory of its own: when a batch script was heard, the world's jobs know."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_requeue(self, core: Core, fact: facts.SlurmOwed, at: float) -> None:
        """Not too soon, and not only because the nodes' time is over."""
        gang, seen = core.state.gangs[fact.gang], core.observed.gang(fact.gang)
        silent_s = at - self._world.jobs.batch_heard_at.get(fact.job, 0.0)
        if "is heard no more" in fact.text:
            require(silent_s >= BATCH_S, f"law 3: a batch script is given up that was heard {silent_s:.1f} s ago")
            return
        _, granted_at = seen.granted or (0, 0.0)
        quiet_s = at - max(seen.attached_at, granted_at, core.observed.since)
        heard = seen.batch is not None and seen.batch.is_of(fact.job, gang.restart_count)
        # While the agent beside it is there, the batch script can't have died with its host.
        there = gang.batch_host is not None and seen.attached(gang.batch_host.node)
        late = heard and not there and silent_s > BATCH_S + MAX_DELAY_S and quiet_s > SPARE_WAIT_S + MAX_DELAY_S
        late = late and not most_silent(GangTurn(Turn(core.state, core.observed, core.index, at), gang))
        require(not late, f"law 4: {gang.id} waits {silent_s:.1f} s for agents, and who starts them is not heard")

    def check_gather_failure(self, gang: Gang) -> None:
        """A gang fails because its nodes don't come."""
        job = self._world.jobs.running_job(gang.id)
        mends = gang.spec.requeue and not self._world.limits.observe and gang.in_vain < IN_VAIN
        require(
            not mends
            or job is None
            or job.restart_count != gang.restart_count
            or self._world.jobs.has_batch_process(job),
            f"law 4: {gang.id} fails because its nodes don't come, and who would have started them died with its host",
        )
