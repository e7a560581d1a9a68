"""The whole estimate of one job on one fabric: what `muster plan` shows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muster.fabric.cost import bisection, pipeline, throughput
from muster.fabric.cost.choice import Collective
from muster.fabric.cost.hierarchy import Tiers
from muster.fabric.cost.model import Model
from muster.fabric.cost.state_bytes import gpus_for_state, state_bytes
from muster.fabric.estimate.chip import Chip
from muster.fabric.estimate.failures import Failures, Outlook, outlook
from muster.fabric.estimate.memory import RESERVED, Memory, fewest_gpus, fitting_split, memory
from muster.fabric.estimate.operations import Operation, compute_bound_limits, layer_operations
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.estimate.spread import Seats, loosest_level, scattered, slowest_groups
from muster.fabric.estimate.step import StepTime, step_time
from muster.fabric.estimate.traffic import Traffic, step_traffic
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, pipeline_pairs, rank_groups
from muster.fabric.model.level import Level


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be estimated."""

    model: Model
    axes: Axes
    schedule: Schedule
    chip: Chip
    seats: Seats
    failures: Failures
    tokens: float = 0.0
    """Tokens of the whole training; 0 if nobody knows."""
    price: float = 0.0
    """Price of a GPU for an hour; 0 if nobody knows."""
    in_network: bool = False
    """Whether the switches reduce."""


@dataclass(frozen=True, slots=True)
class Misplacement:
    """What a step would take if the groups of one kind were scattered, one rank a node, over the loosest links."""

    group: GroupKind
    step: float
    """Seconds."""
    factor: float
    """Over the step as planned."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the job costs. Times are seconds, sizes bytes."""

    step: StepTime
    levels: Mapping[GroupKind, Level]
    """The tier that joins the ranks of each group, for the groups that communicate."""
    memory: Memory
    fits: bool
    fewest_gpus: int | None
    """The smallest number of GPUs that holds the model with this tensor, context and pipeline split; None: none does.
    """
    fitting_split: Axes | None
    """If the model does not fit: a split of the same GPUs with which it does. None: it fits, or no split does."""
    fewest_for_state: int
    """The smallest number of GPUs that holds parameters, gradients and optimizer if they were divided evenly."""
    operations: tuple[Operation, ...]
    widest_compute_bound: int | None
    """The largest tensor degree with which all products are compute bound, with this micro-batch; None: none."""
    fewest_compute_bound_tokens: int | None
    """The fewest tokens of a micro-batch on one rank with which they are, with this tensor degree; None: none."""
    bubble_share: float
    """The share of a pipeline stage's time in which it waits."""
    imbalance: float
    """The layers of the largest stage over the mean."""
    outlook: Outlook
    tokens_a_day: float
    """With what failures cost."""
    days: float
    """0 if the tokens of the training are not known."""
    cost: float
    """In the currency of the price; 0 if it or the days are not known."""
    crossing: float
    """Bytes of one step that cross the bisection of the job's nodes at most, one way: gradients and experts."""
    bisection: float
    """Bytes a second between two halves of the job's nodes, one way."""
    misplacement: Misplacement | None
    """The one that would cost most; None if no group communicates."""


def estimate(plan: Plan) -> Estimate:
    """Estimates a job.

    Raises:
        ValueError: the plan contradicts itself.
    """
    model, axes, schedule, chip = plan.model, plan.axes, plan.schedule, plan.chip
    traffic = step_traffic(model, axes, schedule)
    groups = {one.group: _groups(axes, schedule, one.group) for one in traffic}
    spread = {kind: slowest_groups(every, plan.seats) for kind, every in groups.items()}
    levels = {kind: loosest_level(every, plan.seats) for kind, every in groups.items()}
    step = _step(plan, traffic, spread)
    needed = memory(model, axes, schedule)
    found = outlook(plan.failures, step.total, needed.state + needed.host, plan.seats.local_ranks)
    a_day = found.goodput * model.tokens * throughput.DAY / step.total
    days = throughput.days(plan.tokens, a_day) if plan.tokens and a_day else 0.0
    fits = needed.fits(chip.memory)
    usable = chip.memory * (1 - RESERVED)
    widest, fewest_tokens = compute_bound_limits(model, axes, schedule, chip)
    return Estimate(
        step=step,
        levels=levels,
        memory=needed,
        fits=fits,
        fewest_gpus=fewest_gpus(model, axes, schedule, chip.memory),
        fitting_split=None if fits else fitting_split(model, axes, schedule, chip.memory, plan.seats.local_ranks),
        fewest_for_state=gpus_for_state(model.parameters, state_bytes(model).total, usable),
        operations=layer_operations(model, axes, schedule, chip),
        widest_compute_bound=widest,
        fewest_compute_bound_tokens=fewest_tokens,
        bubble_share=pipeline.bubble_share(axes.pipeline, schedule.micro_batches, schedule.virtual_stages),
        imbalance=pipeline.imbalance(model.layers, axes.pipeline, schedule.virtual_stages),
        outlook=found,
        tokens_a_day=a_day,
        days=days,
        cost=throughput.cost(axes.world_size, days, plan.price),
        crossing=_crossing(traffic, levels, axes),
        bisection=_bisection(plan),
        misplacement=_worst_misplacement(plan, traffic, spread, step.total),
    )


def calibrate(plan: Plan, measured: float) -> Plan:
    """The plan with the efficiency of matrix products at which a step takes the measured time, in seconds.

    Raises:
        ValueError: no efficiency from 1 % to 100 % gives this time. The message says which times are possible.
    """
    model, axes, schedule = plan.model, plan.axes, plan.schedule
    traffic = step_traffic(model, axes, schedule)
    spread = {one.group: slowest_groups(_groups(axes, schedule, one.group), plan.seats) for one in traffic}

    def with_efficiency(efficiency: float) -> Plan:
        return replace(plan, chip=replace(plan.chip, efficiency=efficiency))

    def seconds(efficiency: float) -> float:
        return _step(with_efficiency(efficiency), traffic, spread).total

    low, high = 0.01, 1.0
    if not seconds(high) <= measured <= seconds(low):
        raise ValueError(
            f"a step of {measured:g} s can't be: with this model, split and fabric it takes {seconds(high):.3g} s at "
            f"the GPU's peak, and {seconds(low):.3g} s at 1 % of it"
        )
    for _ in range(40):  # halves the range each time: 1e-12 is left
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return with_efficiency(high)


def _groups(axes: Axes, schedule: Schedule, kind: GroupKind) -> Sequence[Sequence[int]]:
    """The groups of a kind; for the pipeline, the pairs that send to each other."""
    if kind is GroupKind.PIPELINE:
        return pipeline_pairs(axes, virtual_stages=schedule.virtual_stages)
    return rank_groups(axes, kind)


def _step(plan: Plan, traffic: Sequence[Traffic], spread: Mapping[GroupKind, Mapping[Tiers, int]]) -> StepTime:
    return step_time(plan.model, plan.axes, plan.schedule, plan.chip, traffic, spread, in_network=plan.in_network)


def _worst_misplacement(
    plan: Plan, traffic: Sequence[Traffic], spread: Mapping[GroupKind, Mapping[Tiers, int]], planned: float
) -> Misplacement | None:
    return max(_misplacements(plan, traffic, spread, planned), key=lambda one: one.step, default=None)


def _misplacements(
    plan: Plan, traffic: Sequence[Traffic], spread: Mapping[GroupKind, Mapping[Tiers, int]], planned: float
) -> Iterator[Misplacement]:
    for kind in spread:
        ranks = 2 if kind is GroupKind.PIPELINE else next(one.ranks for one in traffic if one.group is kind)
        step = _step(plan, traffic, {**spread, kind: {scattered(ranks, plan.seats): 1}}).total
        yield Misplacement(kind, step, step / planned)


def _crossing(traffic: Sequence[Traffic], levels: Mapping[GroupKind, Level], axes: Axes) -> float:
    """Bytes over the bisection of one step: rings of gradients, and an all-to-all of experts, of all groups.

    Groups within a leaf cross nothing.
    """
    total = 0.0
    for one in traffic:
        if levels[one.group] <= Level.LEAF:
            continue
        groups = axes.world_size // one.ranks
        if one.group in (GroupKind.DATA, GroupKind.EXPERT_DATA):
            # A reduce-scatter or an all-gather is half of the ring of an all-reduce.
            part = 1.0 if one.kind is Collective.ALL_REDUCE else 0.5
            total += groups * part * bisection.ring_crossing(one.ranks, one.total)
        elif one.group is GroupKind.EXPERT:
            total += groups * bisection.all_to_all_crossing(one.ranks, one.total)
    return total


def _bisection(plan: Plan) -> float:
    """N/2 · b of the job's nodes, less the oversubscription of the tier that joins them all. 0: one node."""
    seats = plan.seats
    if len(seats.nodes) < 2:
        return 0.0
    first, *others = seats.nodes
    joining = max((seats.fabric.common(first, other) for other in others), key=lambda domain: len(domain.nodes))
    node = joining.link.bandwidth * seats.rails_of_rank(first) * seats.local_ranks
    return bisection.bisection_bandwidth(len(seats.nodes), node, joining.oversubscription)
