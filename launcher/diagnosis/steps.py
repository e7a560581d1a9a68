"""How fast the steps are: against the prediction, and against earlier runs; and which tier the wait speaks of. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from muster.fabric.cost.hierarchy import Tier, Tiers
from muster.fabric.estimate.estimate import Plan
from muster.fabric.estimate.spread import Seats, slowest_groups
from muster.fabric.estimate.step import StepTime, step_time
from muster.fabric.estimate.traffic import step_traffic
from muster.fabric.groups.rank_groups import GroupKind, pipeline_pairs, rank_groups
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.v1.diagnosis_pb2 import JobMeasurements, PastGeneration, RankStepTime

WAIT_OF_NOTE = 0.1
"""The share of a step from which on its wait is worth a word."""
EXPLAINED = 2.0
"""A wait that is longer than that many times the longest prediction is explained by no tier."""
SLOWER_RANK = 0.15
"""By which share more than the median a rank computes to be named: somewhat more than the straggler detector asks
for, because these are its newest blocks alone."""
SUMMED = (GroupKind.DATA, GroupKind.EXPERT_DATA)
"""The groups whose sums the library times as the wait."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A measured step in seconds: medians of all ranks."""

    compute: float
    wait: float
    fetch: float | None
    """The part of compute in which the script waits for its next batch, on the rank that waits longest. None: it
    declares none.
    """

    @property
    def waits(self) -> float:
        """The share of the step in which ranks wait for gradients."""
        return self.wait / max(self.compute + self.wait, 1e-12)

    @property
    def fetches(self) -> float:
        """The share of the step in which the rank with the slowest data waits for it."""
        return (self.fetch or 0.0) / max(self.compute + self.wait, 1e-12)


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that computes longest, if it stands out."""

    rank: int
    node: str
    longer_by: float
    """A share of the median."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The fastest comparable generation. `share`: the speed now, as a share of that."""

    job: int
    generation: int
    step: float
    at: float
    """Seconds since the epoch."""
    share: float
    same_run: bool
    """It is this very generation, at an earlier time."""
    compared: int
    """Generations of which it is the fastest."""


def parts_of(ranks: Sequence[RankStepTime]) -> Parts | None:
    """The parts of a step; None if no rank reports them."""
    if not ranks:
        return None
    fetches = [one.fetch_s for one in ranks if one.HasField("fetch_s")]
    compute, wait = median(one.compute_s for one in ranks), median(one.wait_s for one in ranks)
    return Parts(compute, wait, max(fetches, default=None))


def slowest_rank(measured: JobMeasurements) -> SlowestRank | None:
    """The rank that all others wait for; None if none stands out."""
    if len(measured.ranks) < 2:
        return None
    usual = median(one.compute_s for one in measured.ranks)
    slowest = max(measured.ranks, key=lambda one: one.compute_s)
    longer = slowest.compute_s / max(usual, 1e-12) - 1
    # If the slowest one waits as long as the others, they don't wait for it.
    waits_less = slowest.wait_s < median(one.wait_s for one in measured.ranks)
    node = next((one.node for one in measured.gang.ranks if one.rank == slowest.rank), "")
    return SlowestRank(slowest.rank, node, longer) if longer >= SLOWER_RANK and waits_less else None


def earlier_of(measured: JobMeasurements) -> Earlier | None:
    """The fastest generation of the same job name, user and settings; None if there is none to compare with."""
    comparable = [one for one in measured.past if one.same_settings and _best(one) > 0]
    if not comparable or measured.step_s <= 0:
        return None
    best = min(comparable, key=_best)
    same = (best.gang_id, best.generation) == (measured.gang.gang_id, measured.gang.generation)
    share = _best(best) / measured.step_s
    at = best.best_s or best.ended_s
    return Earlier(best.slurm_job_id, best.generation, _best(best), at, share, same, len(comparable))


def _best(one: PastGeneration) -> float:
    return one.best_step_s or one.step_s


def predicted(plan: Plan, seats: Seats) -> StepTime:
    """The step of a plan with its ranks in these places."""
    return _step(plan, _spread(plan, seats))


def _spread(plan: Plan, seats: Seats) -> dict[GroupKind, Mapping[Tiers, int]]:
    kinds = {one.group for one in step_traffic(plan.model, plan.axes, plan.schedule)}
    return {kind: slowest_groups(_groups(plan, kind), seats) for kind in kinds}


def _groups(plan: Plan, kind: GroupKind) -> Sequence[Sequence[int]]:
    if kind is GroupKind.PIPELINE:
        return pipeline_pairs(plan.axes, virtual_stages=plan.schedule.virtual_stages)
    return rank_groups(plan.axes, kind)


def _step(plan: Plan, spread: Mapping[GroupKind, Mapping[Tiers, int]]) -> StepTime:
    traffic = step_traffic(plan.model, plan.axes, plan.schedule)
    return step_time(
        plan.model, plan.axes, plan.schedule, plan.chip, traffic, spread, in_network=plan.in_network
    )  # fmt: skip


def wait_of(step: StepTime) -> float:
    """Seconds of a predicted step in which gradients are summed and nothing hides it."""
    return sum(one.exposed for one in step.traffic if one.traffic.group in SUMMED)


def waits_by_tier(plan: Plan, seats: Seats) -> dict[Level, float]:
    """The predicted wait for gradients in seconds, if their groups lay in each tier of the network."""
    found: dict[Level, float] = {}
    for level in Level:
        domains = [one for one in seats.fabric.root.walk() if one.level is level]
        if level is Level.NODE:
            link, over = seats.fabric.node(seats.nodes[0]).gpu_link, 1.0
        elif domains and level is not Level.ACCELERATOR:
            link, over = domains[0].link, domains[0].oversubscription
        else:
            continue
        rails = 1.0 if level <= Level.NVLINK else seats.rails_of_rank(seats.nodes[0]) / over
        if wait := _wait_over(plan, seats, link, rails):
            found[level] = wait
    return found


def wait_over(plan: Plan, seats: Seats, bandwidth: float) -> float:
    """The predicted wait for gradients in seconds, if one link of so many bytes a second holds their groups up."""
    return _wait_over(plan, seats, Link(seats.fabric.root.link.latency, bandwidth), 1.0)


def _wait_over(plan: Plan, seats: Seats, link: Link, rails: float) -> float:
    spread = _spread(plan, seats)
    sizes = {one.group: one.ranks for one in step_traffic(plan.model, plan.axes, plan.schedule)}
    moved: dict[GroupKind, Mapping[Tiers, int]] = {
        kind: {(Tier(sizes[kind], link, rails),): 1} for kind in SUMMED if kind in spread
    }
    return wait_of(_step(plan, {**spread, **moved})) if moved else 0.0


def tier_of_wait(wait: float, by_tier: Mapping[Level, float]) -> Level | None:
    """The tier whose predicted wait is nearest to the measured one, as a ratio; None: no tier explains it."""
    possible = {level: seconds for level, seconds in by_tier.items() if seconds > 0}
    if not possible or wait <= 0 or wait > EXPLAINED * max(possible.values()):
        return None
    # Of tiers with the same speed, the tightest one says least.
    return min(possible, key=lambda level: (round(abs(math.log(wait / possible[level])), 6), -level))


def speaks_of_link(wait: float, over_link: float, by_tier: Mapping[Level, float]) -> bool:
    """Whether a measured wait is nearer to the one over a slow link than to that of the slowest tier, as ratios."""
    slowest = max(by_tier.values(), default=0.0)
    if min(wait, over_link, slowest) <= 0:
        return False
    return abs(math.log(wait / over_link)) < abs(math.log(wait / slowest))


def with_seats(plan: Plan, seats: Seats) -> Plan:
    """The same plan with other places, and with as many replicas as there are."""
    world = len(seats.nodes) * seats.local_ranks
    axes = replace(plan.axes, data=max(1, world * plan.axes.data // plan.axes.world_size))
    return replace(plan, seats=seats, axes=axes)
