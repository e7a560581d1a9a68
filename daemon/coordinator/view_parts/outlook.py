"""When a run of a job has started and ends, when the next one starts, and what happens next. Pure.

Times are seconds on the coordinator's clock, which views show as seconds since the epoch.
"""

from __future__ import annotations

from muster.daemon.coordinator.core.recovery import planned_stop
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, Phase
from muster.v1 import api_pb2
from muster.wording import counted


def add_outlook(view: api_pb2.GangView, gang: Gang, seen: ObservedGang, now: float, limits: Limits) -> None:
    """Fill in the times of the job, and what follows. `limits`: those of the site's policy."""
    view.phase_since_s = gang.phase_at
    if gang.final:
        return
    is_this_run = seen.job_restarts == gang.slurm.restart_count
    if seen.job_pending:
        expected = seen.start_at or 0.0
        view.expected_start_s = expected if expected > now else 0.0  # Slurm keeps one that did not come true
    elif is_this_run and seen.start_at is not None:
        view.run_started_s, view.run_ends_s = seen.start_at, seen.limit_at or 0.0
    stop_at = planned_stop.due_at(gang.spec, gang.slurm, seen)
    if stop_at is not None and not seen.job_pending:
        view.stop_s = stop_at
        view.after_stop = Phase.REQUEUED if gang.spec.requeue_at_limit else Phase.FAILED
    if gang.phase in ACTIVE:
        view.if_node_fails = _if_node_fails(gang, limits)


def _if_node_fails(gang: Gang, limits: Limits) -> str:
    """The way on that is taken first, in the order of the recovery (core/recovery/recovering.py)."""
    seated = {seat.node for seat in gang.roster.seats}
    spares = sum(member.node not in seated for member in gang.roster.present())
    if not seated:  # before the first generation
        spares -= gang.spec.nodes
    if limits.observe:
        return "the job ends: the site has Muster in observe mode"
    if spares > 0:
        return f"a spare takes its place: {counted(spares, 'is', 'are')} left"
    if limits.pool.options and gang.spec.pool_nodes > len(gang.pool_members()):
        return "a node of the shared pool is asked for: no spare is left"
    if gang.spec.fewest < (nodes := len(seated) or gang.spec.nodes):
        return f"the job goes on with {counted(nodes - 1, 'node')} or fewer: no spare is left"
    if gang.spec.requeue:
        return "the job is requeued: no spare is left"
    return "the job ends: no spare is left, and job.toml forbids a requeue"
