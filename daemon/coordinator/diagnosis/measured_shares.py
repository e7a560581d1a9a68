"""Which parts of the time of a running generation's steps went elsewhere, as its agents have measured. Pure."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from muster.daemon.coordinator.core.recovery import flushing
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.goodput.intervals import Measured
from muster.daemon.coordinator.view_parts.measured_steps import MeasuredSteps, measured_steps


def measured_shares(gang: Gang, seen: ObservedGang) -> Measured:
    """Of the gang's newest generation; zeros: nothing was measured."""
    found = measured_steps(gang, seen)
    logged = _logged(gang, seen)
    if found.step_s <= 0:
        return logged
    named = any(one.generation == gang.newest.generation for one in gang.findings.stragglers)
    fetched = [rank.fetch_s for rank in found.ranks if rank.fetch_s is not None]
    return replace(
        logged,
        checkpoint=_snapshots(seen) + _flushes(gang, seen, found),
        straggler=_slowest_s(found) / found.step_s if named else 0.0,
        data=median(fetched) / found.step_s if fetched else 0.0,
    )


def _logged(gang: Gang, seen: ObservedGang) -> Measured:
    """From when on, and of which steps, numbers came."""
    reports = (seen.status(seat.node).training for seat in gang.roster.seats)
    said = [one for one in reports if one is not None and one.generation == gang.newest.generation and one.first_at_s]
    if not said:
        return Measured()
    first = min(said, key=lambda one: one.first_at_s)
    return Measured(first_at=first.first_at_s, first_step=first.first_step, step=max(one.step for one in said))


def _snapshots(seen: ObservedGang) -> float:
    costs = (agent.status.snapshot_cost for agent in seen.agents.values())
    return next((cost.share for cost in costs if cost is not None), 0.0)


def _flushes(gang: Gang, seen: ObservedGang, found: MeasuredSteps) -> float:
    between_s = flushing.durable_interval_s(gang, seen) or gang.spec.durable_every_steps * found.step_s
    return min(1.0, seen.flush_costs.stall_s / between_s) if between_s else 0.0


def _slowest_s(found: MeasuredSteps) -> float:
    """By how much the slowest rank computes longer than the others do."""
    return max((rank.compute_s for rank in found.ranks), default=found.compute_s) - found.compute_s
