"""Invariants 6 and 7: what Muster takes from the site.

No more nodes are taken out of service than site and job allow, and no job is recovered when it has used up its part of
the journal; in observe mode nothing is done (6). A node keeps memory only for a gang that may come back, for ten
minutes at most, and never beside another job (7).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.detection.circuit_breaker import MIB
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.account import counted_bytes
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.node.kept_memory.retention import KeptEntry
from muster.node_health import OUT_OF_SERVICE
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World


FADED = 1.1
"""A run of the simulator takes less than an hour, in which what was counted fades by 4 %."""


class SiteLimitInvariant:
    """The nodes that are out of service, and all nodes that ever went out of service, in order.

    By gang: the pool job of each open pool request. The core closes a request in the turn in which its node joins if
    too few nodes have come. So the durable state after the turn does not show whether the node was requested.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._out: set[str] = set()
        self._taken: list[str] = []
        self._reported: list[str] = []
        self._pool_jobs: dict[str, dict[int, int]] = {}
        self._recorded: defaultdict[str, float] = defaultdict(float)
        self._recorded_at_fence: defaultdict[str, float] = defaultdict(float)

    def recorded(self, gang: Gang, fact: facts.Fact) -> None:
        """The journal has a further record of the gang. Registrations have a budget of their own."""
        if isinstance(fact, facts.GenerationFenced):
            self._recorded_at_fence[gang.id] = self._recorded[gang.id]
        if not isinstance(fact, facts.GangRegistered):
            self._recorded[gang.id] += counted_bytes(fact, gang.slurm.most_nodes)

    def check_start(self, fact: facts.GenerationStarted) -> None:
        """The coordinator starts a generation."""
        observed = self._world.limits.observe and fact.action not in ("start", "requeue")
        require(not observed, f"invariant 6: generation {fact.generation} starts in observe mode")
        used_mib, most = self._recorded_at_fence[fact.gang] / MIB, self._world.limits.journal_mib_per_job
        require(
            used_mib < most * FADED,
            f"invariant 6: generation {fact.generation} starts, and the gang has used {used_mib:.2f} of {most} MiB",
        )

    def pool_job_queued(self, fact: facts.PoolJobQueued) -> None:
        """A pool job answers a request."""
        self._pool_jobs.setdefault(fact.gang, {})[fact.serial] = fact.job

    def pool_request_closed(self, fact: facts.PoolRequestClosed) -> None:
        """No node of this request may join any more."""
        self._pool_jobs.get(fact.gang, {}).pop(fact.serial, None)

    def check_join(self, gang: Gang, fact: facts.MemberJoined) -> None:
        """No more nodes of the shared pool join than the job may have, and each was requested. Any other node
        that joins with a job of its own is one that the gang's job has lost, in the run that the core knows: Slurm may
        have requeued the job since."""
        if fact.job == gang.slurm.job:
            return
        jobs = self._world.jobs
        joined = [
            member for member in gang.roster.present() if member.job != gang.slurm.job and jobs.is_of_pool(member.job)
        ]
        require(
            len(joined) <= gang.spec.pool_nodes and fact.job in self._pool_jobs.get(gang.id, {}).values(),
            f"invariant 6: {fact.node} joins from the pool as number {len(joined)} of {gang.spec.pool_nodes}",
        )
        require(
            jobs.is_of_pool(fact.job) or fact.node in jobs.ever_held(gang.slurm.job, gang.slurm.restart_count),
            f"invariant 6: {fact.node} comes back to {gang.id}, whose job never had it",
        )

    def health_changed(self, fact: facts.NodeJudged) -> None:
        """The core changes a node's health."""
        if fact.health not in OUT_OF_SERVICE:
            self._out.discard(fact.node)
        elif fact.node not in self._out:
            self._out.add(fact.node)
            if fact.node not in self._reported:
                self._taken.append(fact.node)

    def check_taken(self, fact: facts.SlurmCallOwed) -> None:
        """Slurm shall take a node out of service."""
        limits = self._world.limits
        require(not limits.observe, f"invariant 6: {fact.node} is taken out of service in observe mode")
        if fact.requested_by:
            asked = fact.node in self._world.requested_drains
            require(asked, f"invariant 6: {fact.node} is drained for {fact.requested_by}, who has not asked for it")
            return
        if fact.if_run_has_node is not None:  # the node's health changes only once Slurm has drained the node
            before, most = {*self._reported} - {fact.node}, limits.reported_drains_per_hour_of_user
            self._reported.append(fact.node)
        else:
            last = len(self._taken) - 1 - self._taken[::-1].index(fact.node) if fact.node in self._taken else None
            before, most = {*self._taken[:last]} - {fact.node}, limits.nodes_per_hour
        require(
            len(before) < most,
            f"invariant 6: {fact.node} is taken out of service after {sorted(before)}: the limit is {most}",
        )


class KeptMemoryInvariant:
    """The runs of each gang's job that were requeued."""

    def __init__(self) -> None:
        self._requeued: set[tuple[str, int]] = set()

    def gang_requeued(self, gang: Gang) -> None:
        """The gang comes back."""
        self._requeued.add((gang.id, gang.slurm.restart_count))

    def shards_handed_over(self, agent: Agent) -> None:
        """An agent hands its shards to its node's daemon."""
        gang = agent.identity.gang
        require(
            (gang, agent.identity.restarts) in self._requeued or agent.failure,
            f"invariant 7: {agent.node} keeps memory of {gang}, and the gang does not come back",
        )

    def prolog_finished(self, node: str, job: int, kept: KeptEntry[Any] | None) -> None:
        """A job's first process is about to start on a node that keeps this memory."""
        foreign_gang = kept.gang if kept is not None and kept.owner.job != job else ""
        require(
            not foreign_gang, f"invariant 7: job {job} starts on {node}, which still keeps memory of {foreign_gang}"
        )

    def kept_memory_checked(self, node: str, now: float, kept: KeptEntry[Any] | None) -> None:
        """A node keeps this memory at this time."""
        expired_gang = kept.gang if kept is not None and kept.until <= now else ""
        require(not expired_gang, f"invariant 7: {node} keeps memory of {expired_gang} for too long")
