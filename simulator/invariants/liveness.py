"""Of law 4: nothing is owed for ever, nobody waits in vain. And no gang fails for a software that did not crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery.gang_end import EXIT_NO_REQUEUE
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.state_tables import Phase, Verdict
from muster.simulator.invariants.violation import require
from muster.slurm.client.states import JobState

if TYPE_CHECKING:
    from muster.simulator.world.world import World
    from muster.slurm.client.types import Job


class LivenessInvariant:
    """The generations of each gang that crashed or hung by themselves."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._crashes: dict[str, set[int]] = {}

    def generation_failed(self, gang: str, generation: int) -> None:
        """A generation has a rank that crashed or hung, and nobody had killed it."""
        self._crashes.setdefault(gang, set()).add(generation)

    def check_software_failure(self, gang: Gang) -> None:
        """A gang fails for its software."""
        crashes = self._crashes.get(gang.id, set())
        require(
            len(crashes) >= gang.spec.max_failures,
            f"{gang.id} fails for its software, of which only generations {sorted(crashes)} crashed",
        )

    def batch_script_ended(self, gang: Gang, job: Job) -> None:
        """A batch script ends, and its job with it."""
        require(gang.final, f"law 4: {gang.id} is {gang.phase}, and its job ends")
        require(
            gang.exit_code != EXIT_NO_REQUEUE or not job.requeue,
            f"law 4: {gang.id} has failed for good, and its job ends with its requeue flag on",
        )

    def run_settled(self, state: DurableState) -> None:
        """Nothing is owed, and every job that waits may start."""
        require(not state.owed, f"law 4: Slurm is owed {state.owed}")
        for gang in state.gangs.values():
            self._check_may_start(gang, state)

    def _check_may_start(self, gang: Gang, state: DurableState) -> None:
        """A job that waits is kept from no node that was put back into service meanwhile."""
        job = self._world.cluster.jobs().get(gang.job)
        if gang.phase is not Phase.REQUEUED or job is None or job.state is not JobState.PENDING:
            return
        nodes = [state.node(name) for name in job.excluded]
        back = [node.name for node in nodes if node.verdict is Verdict.FIT and node.judged_at > gang.phase_at]
        require(not back, f"law 4: {gang.id} waits, and its job may not start on {back}, which are in service")
