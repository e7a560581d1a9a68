"""Law 6: no more nodes are taken than the site and the job allow; in observe mode nothing is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import OUT_OF_SERVICE
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class SiteLimitInvariant:
    """The nodes that are out of service, and which ones ever went out, in that order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._out: set[str] = set()
        self._taken: list[str] = []

    def check_start(self, fact: facts.GenerationStarted) -> None:
        """The coordinator lets a generation start."""
        observed = self._world.limits.observe and fact.action not in ("start", "requeue")
        require(not observed, f"law 6: generation {fact.generation} starts in observe mode")

    def check_join(self, gang: Gang, fact: facts.MemberJoined) -> None:
        """From the pool come no more nodes than the job may have, and each was asked for."""
        if fact.job == gang.job:
            return
        joined = [member for member in gang.present() if member.job != gang.job]
        require(
            len(joined) <= gang.spec.pool_nodes and any(request.job == fact.job for request in gang.pool.values()),
            f"law 6: {fact.node} joins from the pool as number {len(joined)} of {gang.spec.pool_nodes}",
        )

    def health_changed(self, fact: facts.NodeJudged) -> None:
        """A node is called something."""
        if fact.verdict not in OUT_OF_SERVICE:
            self._out.discard(fact.node)
        elif fact.node not in self._out:
            self._out.add(fact.node)
            self._taken.append(fact.node)

    def check_taken(self, fact: facts.SlurmOwed) -> None:
        """Slurm shall take a node out of service."""
        limits = self._world.limits
        before = {*self._taken[: -self._taken[::-1].index(fact.node) - 1]} - {fact.node}
        require(not limits.observe, f"law 6: {fact.node} is taken out of service in observe mode")
        require(
            len(before) < limits.nodes_per_hour,
            f"law 6: {fact.node} is taken out of service after {sorted(before)}: {limits.nodes_per_hour} may be",
        )
