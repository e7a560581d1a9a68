"""Invariant 4 for gangs and runs: no call is owed for ever, and no gang waits in vain.

No gang fails because of its software unless the software crashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery.requeueing import FAILED_LAUNCHES
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.exit_codes import EXIT_FAILED_AGAIN
from muster.node_health import NodeHealth
from muster.simulator.world.observer import require
from muster.slurm.client.states import JobState

if TYPE_CHECKING:
    from muster.simulator.world.world import World
    from muster.slurm.client.types import Job


def awaits_release(gang: Gang, job: Job, limits: Limits) -> bool:
    """Slurm holds the job after a failed launch, and the coordinator need not leave it to the user."""
    may = gang.spec.requeue and not limits.observe and gang.slurm.runs_without_start < FAILED_LAUNCHES
    return job.held and may


class LivenessInvariant:
    """By gang: the generations that crashed or hung by themselves, or could not be told from such."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._crashes: dict[str, set[int]] = {}

    def generation_failed(self, gang: str, generation: int) -> None:
        """A rank of this generation crashed or hung, and was not killed."""
        self._crashes.setdefault(gang, set()).add(generation)

    def generation_fenced(self, gang: Gang, fact: facts.GenerationFenced) -> None:
        """The coordinator orders the end of a generation.

        Ranks that fenced themselves and outlive SIGKILL can't be told from ranks that hang: their agents' statuses show
        neither the kill nor its cause.
        """
        training = self._world.newest_training(gang.id)
        if training is None or training.generation != fact.generation or not gang.recovery.recoveries:
            return
        if fact.hardware or not gang.recovery.recoveries[-1].hung:
            return
        if any(rank.alive and rank.kill_sent for rank in training.ranks.values()):
            self.generation_failed(gang.id, fact.generation)

    def check_software_failure(self, gang: Gang) -> None:
        """A gang fails because of its software."""
        crashes = self._crashes.get(gang.id, set())
        require(
            len(crashes) >= gang.spec.max_failures,
            f"{gang.id} fails because of its software, and only generations {sorted(crashes)} crashed",
        )

    def batch_script_ended(self, gang: Gang, job: Job) -> None:
        """A batch script ends, and its job with it."""
        require(gang.final, f"invariant 4: {gang.id} is {gang.phase}, and its batch script ends")
        require(
            gang.exit_code != EXIT_FAILED_AGAIN or not job.requeue,
            f"invariant 4: {gang.id} has failed for good, and its job keeps its requeue flag",
        )

    def run_settled(self, state: DurableState) -> None:
        """No call is owed to Slurm, and every waiting job may start."""
        require(not state.owed, f"invariant 4: calls are still owed to Slurm: {state.owed}")
        for gang in state.gangs.values():
            self._check_may_start(gang, state)

    def _check_may_start(self, gang: Gang, state: DurableState) -> None:
        """A waiting job excludes no node that was put back into service meanwhile."""
        job = self._world.cluster.jobs().get(gang.slurm.job)
        if gang.phase is not Phase.REQUEUED or job is None or job.state is not JobState.PENDING:
            return
        nodes = [state.node(name) for name in job.excluded]
        returned = [node.name for node in nodes if node.health is NodeHealth.FIT and node.judged_at > gang.phase_at]
        require(not returned, f"invariant 4: {gang.id} waits, and its job excludes {returned}, which are in service")
