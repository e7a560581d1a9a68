"""From the story of a job to the values of its report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.goodput.intervals import TRAINED, Category, Interval, sums
from muster.fabric.model.node import natural_order
from muster.launcher.report.faults import PHASES, faults, recoveries
from muster.launcher.report.plain_requeue import plain_requeue
from muster.launcher.report.report_data import (
    Band,
    Curve,
    Fault,
    Generation,
    Goodput,
    Head,
    HeatMap,
    Leaf,
    PlacedNode,
    ReportData,
)
from muster.launcher.report.story import Story

_TRAINING = {*TRAINED, Category.STEPS_AGAIN, Category.STRAGGLER, Category.DATA}


def report_of(
    story: Story,
    user: str,
    made_s: float,
    goodput: Goodput,
    curves: tuple[Curve, ...] = (),
    heat: HeatMap | None = None,
    notes: tuple[str, ...] = (),
    result: str = "",
    step: int = 0,
) -> ReportData:
    """All values. `goodput` has the price and the GPUs of a node. `result` and `step`: if they are known better than
    from the records."""
    found = faults(story)
    return ReportData(
        head=_head(story, user, goodput.gpus_per_node, result, step),
        made_s=made_s,
        bands=tuple(_bands(story.intervals)),
        generations=tuple(_generations(story)),
        faults=found,
        recoveries=recoveries(story),
        goodput=goodput,
        requeue=plain_requeue(story, goodput),
        curves=curves,
        heat=heat,
        leaves=_leaves(story, found),
        notes=notes,
    )


def _head(story: Story, user: str, gpus_per_node: int, result: str, step: int) -> Head:
    gang = story.gang
    reached = gang.newest.progress.step
    words = result or ": ".join(filter(None, (gang.phase.value, gang.reason)))
    words += f" (exit code {gang.exit_code})" if gang.final and gang.exit_code else ""
    nodes = len(story.ranks) or gang.spec.nodes
    return Head(
        name=gang.account.name, gang=gang.id, job=gang.slurm.job, user=user, phase=gang.phase.value, result=words,
        submitted_s=gang.account.registered_at, until_s=story.until, is_over=story.is_over,
        nodes=nodes, ranks=nodes * gang.spec.ranks_per_node, gpus_per_node=gpus_per_node,
        generations=gang.newest.generation,
        step=step or (reached.step if reached else 0),
    )  # fmt: skip


def account_of(story: Story, gpus_per_node: int, price: float) -> Goodput:
    """The account as the facts alone tell it."""
    parts = {category.value: node_s for category, node_s in sums(story.intervals).items()}
    return goodput_of(parts, story, gpus_per_node, price)


def goodput_of(parts: Mapping[str, float], story: Story, gpus_per_node: int, price: float) -> Goodput:
    """The account of these parts, in node-seconds by category. The queue is not allocated."""
    of_size = sorted(parts.items(), key=lambda item: -item[1])
    lost = tuple((name, node_s) for name, node_s in of_size if name not in (*TRAINED, "queue"))
    allocated = sum(node_s for name, node_s in parts.items() if name != "queue")
    waited = sum(one.until - one.since for one in story.intervals if one.category is Category.QUEUE)
    useful = sum(parts.get(name, 0.0) for name in TRAINED)
    return Goodput(allocated, useful, lost, waited, gpus_per_node, price, parts.get(Category.STEPS_UNKNOWN, 0.0))


def _kind(one: Interval) -> str:
    """The band of the time line that an interval belongs to; empty: none."""
    if one.category is Category.QUEUE:
        return "queue"
    if not one.nodes or one.category is Category.SPARE:
        return ""
    if one.category in _TRAINING or (one.category is Category.CHECKPOINT and one.share < 1):
        return "training"
    if one.category is Category.CHECKPOINT:
        return "end"
    return "recovery" if one.fault is not None and one.category in PHASES else "start"


def _bands(intervals: Iterable[Interval]) -> Iterator[Band]:
    """The phases in the order of time, without gaps of rounding and without overlaps."""
    last: Band | None = None
    for one in sorted(intervals, key=lambda one: (one.since, one.until)):
        kind = _kind(one)
        begin = max(one.since, last.end_s) if last else one.since
        if not kind or one.until <= begin:
            continue
        if last and last.kind == kind and begin - last.end_s < 0.001:
            last = Band(kind, last.begin_s, one.until)
            continue
        if last:
            yield last
        last = Band(kind, begin, one.until)
    if last:
        yield last


def _generations(story: Story) -> Iterator[Generation]:
    """Each generation from its start until its fence, or until its run was over."""
    running: facts.GenerationStarted | None = None
    begin = 0.0
    for at, fact in story.facts:
        ends = isinstance(fact, facts.GenerationFenced | facts.GangEnded | facts.JobRestarted) or (
            isinstance(fact, facts.PhaseChanged) and fact.phase in (Phase.REQUEUED, Phase.DRAINING)
        )
        if running and (ends or isinstance(fact, facts.GenerationStarted)):
            yield Generation(running.generation, begin, at, len(running.seats))
            running = None
        if isinstance(fact, facts.GenerationStarted):
            running, begin = fact, at
    if running:
        yield Generation(running.generation, begin, story.until, len(running.seats))


def _leaves(story: Story, found: tuple[Fault, ...]) -> tuple[Leaf, ...]:
    """All nodes that the job ever had, by leaf, with the numbers of the faults on them."""
    numbers: dict[str, list[int]] = {}
    for fault in found:
        for node in fault.nodes:
            numbers.setdefault(node, []).append(fault.number)
    by_leaf: dict[str, list[str]] = {}
    for node, leaf in story.nodes.items():
        by_leaf.setdefault(leaf or "leaf not known", []).append(node)
    return tuple(
        Leaf(leaf, tuple(_placed(story, node, numbers) for node in sorted(nodes, key=natural_order)))
        for leaf, nodes in sorted(by_leaf.items(), key=lambda item: natural_order(item[0]))
    )


def _placed(story: Story, node: str, numbers: Mapping[str, list[int]]) -> PlacedNode:
    member = story.gang.roster.members.get(node)
    out = member is None or member.removed
    ranks = None if out else story.ranks.get(node)
    role = "out" if out else "ranks" if ranks else "spare"
    return PlacedNode(node, role, ranks, tuple(numbers.get(node, ())))
