"""Invariant 8: a planned swap costs no finished step, has a precursor or a user's request as its reason, and moves
ranks only where a spare is ready. A node of the shared pool may also give way to one of the job's own.

A planned growth costs no finished step either, puts ranks on good nodes only, and comes when it can. Such restarts for
no fault are minutes apart.

The step that all ranks have kept before they left counts as committed (`versions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.world.observer import require

APART_S = 240.0
"""Seconds that restarts without a fault are apart, at least."""
GROWN_WITHIN_S = 30.0
"""Seconds for which a gang trains beside a ready spare before it must have grown."""
PAUSE_S = 310.0
"""Seconds after a restart without a fault for which a gang need not grow."""

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class PlannedSwapInvariant:
    """What a planned swap needs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planned: set[tuple[str, int]] = set()
        """Gang and generation of every planned swap and growth."""
        self._gives_way: set[tuple[str, str]] = set()
        """Gang and node of every node of the pool that was to give way."""
        self._seats: dict[str, int] = {}
        """Gang → the number of nodes with ranks of its newest generation."""
        self._restarted_at: dict[str, float] = {}
        """Gang → when it was last restarted to grow, or for a node of the pool."""
        self._planned_at: dict[str, float] = {}
        """Gang → when such a restart was last planned."""
        self._came: dict[str, set[str]] = {}
        """Gang → the nodes that its last growth has brought, if that was the last change of its nodes."""
        self._seated: dict[str, set[str]] = {}
        """Gang → the nodes with ranks of its newest generation."""

    def check_plan(self, core: Core, fact: facts.SwapPlanned) -> None:
        """The core plans to leave a node."""
        self._planned.add((fact.gang, fact.generation))
        gang, machine = core.state.gangs[fact.gang], self._world.machines[fact.node]
        seated = {seat.node for seat in gang.roster.seats}
        spares = [m.node for m in gang.roster.present() if m.node not in seated]
        ready = [name for name in spares if core.state.node(name).health is NodeHealth.FIT]
        requested = bool(fact.requested_by) and self._is_requested(fact.gang, fact.node)
        evidence = machine.has_precursor or machine.has_slow_rank
        if fact.gives_way_to:
            jobs, members = self._world.jobs, gang.roster.members
            evidence = jobs.is_of_pool(members[fact.node].job) and not jobs.is_of_pool(members[fact.gives_way_to].job)
            ready = [name for name in ready if name == fact.gives_way_to]
            self._gives_way.add((fact.gang, fact.node))
            self._check_apart(fact.gang)
            self._planned_at[fact.gang] = self._world.schedule.now
        require(
            requested or (evidence and not fact.requested_by),
            f"invariant 8: {fact.node} shall be left, without evidence or a request",
        )
        require(bool(ready), f"invariant 8: {fact.node} shall be left, and no spare of {gang.id} is ready")
        require(
            gang.phase is Phase.RUNNING and fact.node in seated,
            f"invariant 8: {fact.node} shall be left, and no rank of {gang.id} trains on it",
        )

    def check_growth(self, core: Core, fact: facts.GrowthPlanned, at: float) -> None:
        """The core plans to put ranks on more nodes."""
        self._planned.add((fact.gang, fact.generation))
        self._planned_at[fact.gang] = self._world.schedule.now
        gang = core.state.gangs[fact.gang]
        seats = len(gang.roster.seats)
        require(
            gang.phase is Phase.RUNNING and seats < fact.nodes <= gang.spec.nodes,
            f"invariant 8: {gang.id} in phase {gang.phase} shall grow from {seats} to {fact.nodes} nodes",
        )
        good = self._good_spares(core, gang)
        require(
            len(good) >= fact.nodes - seats,
            f"invariant 8: {gang.id} shall grow from {seats} to {fact.nodes} nodes, and has only {good}",
        )
        self._check_apart(fact.gang)

    def check_start(self, core: Core, gang: Gang, fact: facts.GenerationStarted, at: float) -> None:
        """A generation starts. More ranks than before are no accident."""
        before = self._seats.get(fact.gang, 0)
        self._seats[fact.gang] = len(fact.seats)
        seated, seated_before = {seat.node for seat in fact.seats}, self._seated.get(fact.gang, set())
        self._seated[fact.gang] = seated
        if fact.action in ("more replicas", "pool node gives way"):
            self._restarted_at[fact.gang] = at
            self._came[fact.gang] = seated - seated_before
        elif seated != seated_before:
            self._came.pop(fact.gang, None)
        if fact.action not in ("start", "requeue"):
            grew = len(fact.seats) > before
            require(
                not grew or (fact.action == "more replicas" and (fact.gang, fact.generation - 1) in self._planned),
                f"invariant 8: generation {fact.generation} has more nodes than the one before, which was not planned",
            )

    def check_software_failure(self, gang: Gang) -> None:
        """A gang fails because of its software. The nodes that its last growth has brought are not the cause."""
        machines = self._world.machines
        broken = [n for n in self._came.get(gang.id, set()) if machines[n].crashes_ranks_after is not None]
        require(not broken, f"invariant 8: {gang.id} fails, and has trained well before {broken} came")

    def _good_spares(self, core: Core, gang: Gang) -> list[str]:
        """Spares on which nothing is wrong, as far as the core has heard."""
        seated = {seat.node for seat in gang.roster.seats}
        return [
            member.node
            for member in gang.roster.present()
            if member.node not in seated
            and core.state.node(member.node).health is NodeHealth.FIT
            and core.state.node(member.node).drain is None
            and member.node not in core.observed.gang(gang.id).suspected_since
            and not member.failed_check
        ]

    def _check_apart(self, gang: str) -> None:
        last, now = self._restarted_at.get(gang), self._world.schedule.now
        require(
            last is None or now - last >= APART_S,
            f"invariant 8: {gang} is to be restarted without a fault {now - (last or 0.0):.0f} s after the last time",
        )

    def run_settled(self, core: Core) -> None:
        """No gang trains for long with fewer nodes than it has."""
        for gang in core.state.gangs.values():
            first_step_at = max((one.first_step_at for one in gang.recovery.recoveries[-1:]), default=0.0)
            since = max(first_step_at, self._grows_after(gang))
            joined = [at for at, fact in self._world.observer.journal if isinstance(fact, facts.MemberJoined)]
            now = self._world.schedule.now
            if gang.phase is not Phase.RUNNING or len(gang.roster.seats) >= gang.spec.nodes:
                continue
            if not first_step_at or now - max([since, *joined]) < GROWN_WITHIN_S or self._has_reason_to_stay(gang):
                continue
            good = self._good_spares(core, gang)
            require(not good, f"invariant 8: {gang.id} has stayed at {len(gang.roster.seats)} nodes beside {good}")

    def _grows_after(self, gang: Gang) -> float:
        """When the pause after the last restart without a fault is over (seconds). Each growth that was undone doubles
        the pause."""
        planned_at, undone = (
            self._planned_at.get(gang.id),
            sum(bool(one.nodes_undone) for one in gang.recovery.recoveries),
        )
        return 0.0 if planned_at is None else planned_at + PAUSE_S * 2**undone

    def _has_reason_to_stay(self, gang: Gang) -> bool:
        limits = self._world.limits
        limited = self._world.jobs.job(gang.id).time_limit_s is not None
        return limited or limits.observe or limits.journal_mib_per_job < 1 or bool(gang.growth.pool and gang.plans.swap)

    def check_fence(self, gang: Gang, fact: facts.GenerationFenced) -> None:
        """A generation ends. If its ranks were asked to leave, there was a plan."""
        training = self._world.newest_training(fact.gang)
        if training is None or training.generation != fact.generation or fact.cause == facts.PREFLIGHT_CAUSE:
            return
        ranks = training.ranks.values()
        stopped = bool(ranks) and all(rank.exit_code == 0 or rank.stopped_step for rank in ranks)
        left = stopped and gang.plans.stop is None and not self._world.is_finished(fact.gang)
        require(
            not left or (fact.gang, fact.generation) in self._planned,
            f"invariant 8: the ranks of generation {fact.generation} were asked to leave, and no swap was planned",
        )

    def check_removal(self, fact: facts.MemberRemoved) -> None:
        """A node leaves a gang. Nobody is asked to leave but by a user, or to give way, or because it is of no use."""
        require(
            not fact.requested or self._is_requested(fact.gang, fact.node) or (fact.gang, fact.node) in self._gives_way,
            f"invariant 8: {fact.node} leaves {fact.gang} on request, and nobody has asked",
        )
        require(
            not fact.undoes_growth or fact.node in self._came.get(fact.gang, set()),
            f"invariant 8: {fact.node} leaves {fact.gang} to undo a growth, and was there before",
        )
        require(
            not fact.surplus or fact.node not in self._seated.get(fact.gang, set()),
            f"invariant 8: {fact.node} leaves {fact.gang} as a node without ranks, and has some",
        )

    def _is_requested(self, gang: str, node: str) -> bool:
        return (gang, node) in self._world.requested_swaps or node in self._world.requested_drains

    def check_end(self, gang: Gang) -> None:
        """A gang is done. Its ranks have not exited only because they were asked to leave a node. A script that never
        launches has none, and its job has completed."""
        script_is_over = gang.spec.awaits_launch and gang.slurm.job_over
        require(
            gang.plans.stop is not None or script_is_over or self._world.is_finished(gang.id),
            f"invariant 8: {gang.id} is done, and its script has not come to its end",
        )
