"""An estimate as one screen of text. Each number has its unit; what rests on a default is listed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.daemon.host.plain_text import plain
from muster.fabric.cost import roofline
from muster.fabric.cost.choice import Collective
from muster.fabric.cost.model import Checkpointing, Sharding
from muster.fabric.cost.pipeline import bubble_share
from muster.fabric.estimate.memory import RESERVED
from muster.fabric.estimate.step import PricedTraffic
from muster.fabric.groups.axes import write_order
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import labelled, table
from muster.launcher.plan.node_memory import node_memory
from muster.launcher.plan.places import asked_level
from muster.launcher.plan.prepare import PreparedPlan
from muster.launcher.spec.spec import Job
from muster.wording import counted, duration, gigabytes, percent, scaled

WHERE = {
    Level.NODE: "in a node",
    Level.NVLINK: "in an NVLink domain",
    Level.LEAF: "in a leaf",
    Level.POD: "in a pod",
    Level.ANY: "over the network",
}
"""Each tier in words."""
_SCATTERED = {
    GroupKind.TENSOR: "each rank of a tensor group on another node",
    GroupKind.CONTEXT: "each rank of a context group on another node",
    GroupKind.EXPERT: "each rank of an expert group on another node",
    GroupKind.PIPELINE: "neighbours of a pipeline as far apart as can be",
    GroupKind.DATA: "each rank of a data group on another node, over the loosest links",
    GroupKind.EXPERT_DATA: "each rank of an expert data group on another node, over the loosest links",
}


_LABEL = len("misplaced")
_MOST_VIRTUAL_STAGES = 1024
"""More are never proposed: a pipeline with so many sends all the time."""


def lines(prepared: PreparedPlan, screen: Screen) -> Iterator[str]:
    """The screen."""
    accelerators = f"{prepared.plan.axes.world_size:,} {prepared.accelerator}"
    yield from screen.sentence(plain(f"{title(prepared.job, accelerators)}; an estimate, nothing is queued"))
    yield from labelled(screen, _job(prepared), _LABEL)
    yield ""
    yield from _traffic(prepared, screen)
    yield ""
    yield from labelled(screen, _figures(prepared), _LABEL)
    if prepared.defaults:
        yield ""
        yield from _defaults(prepared, screen)


def _figures(prepared: PreparedPlan) -> Iterator[tuple[str, str]]:
    for label, texts in (
        ("step", _step),
        ("memory", _memory),
        ("roofline", _roofline),
        ("pipeline", _pipeline),
        ("failures", _failures),
        ("training", _training),
        ("misplaced", _misplacement),
    ):
        yield from ((label, text) for text in texts(prepared))


def title(job: Job, ranks: str) -> str:
    """The begin of the first line. `ranks`: how many ranks, in words."""
    spares = f" and {counted(job.spares, 'spare')}" if job.spares else ""
    return f"{job.name}: {ranks} on {counted(job.nodes, 'node', form=',')}{spares}"


def _job(prepared: PreparedPlan) -> Iterator[tuple[str, str]]:
    model, axes, schedule = prepared.plan.model, prepared.plan.axes, prepared.plan.schedule
    batch = f"batch {model.global_batch:,} × {model.sequence_length:,} tokens"
    shape = f"{model.layers} layers of {model.hidden_size:,}"
    kept = f"checkpointing {model.activation_checkpointing}, sharding {model.sharding}, offload {model.offload}"
    yield "model", f"{scaled(model.parameters, '')} parameters, {shape}; {batch}"
    yield "model", f"{model.precision}, {model.optimizer}; {kept}"
    degrees = [(name, getattr(axes, name)) for name in ("tensor", "context", "expert", "data", "pipeline")]
    words = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one rank"
    sequence = ", sequence" if schedule.sequence else ""
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    yield (
        "axes",
        f"{words}{sequence}; order {write_order(axes.order)}; {schedule.micro_batches} micro-batches of "
        f"{schedule.micro_batch}{virtual}",
    )
    yield "network", prepared.fabric


def _traffic(prepared: PreparedPlan, screen: Screen) -> Iterator[str]:
    """The table of what one rank sends and receives in one step."""
    titles = (
        "traffic",
        "ranks",
        "where",
        "collective",
        "calls",
        "bytes each",
        "algorithm",
        "time",
        "exposed",
        "behind",
    )
    estimate = prepared.estimate
    rows = [_row(one, prepared) for one in estimate.step.traffic]
    if not rows:
        yield from labelled(screen, [("traffic", "none: one rank")], _LABEL)
        return
    yield from table(screen, titles, rows)
    if estimate.crossing:
        least = duration(estimate.crossing / estimate.bisection)
        words = f"{scaled(estimate.bisection, 'B/s')} of bisection in a step: {least} at least"
        yield from screen.sentence(f"at most {scaled(estimate.crossing, 'B')} of gradients and experts cross {words}")
    elif len(prepared.plan.seats.nodes) > 1:
        words = f"no gradients and experts cross the bisection of {scaled(estimate.bisection, 'B/s')}"
        yield from screen.sentence(words)


def _row(one: PricedTraffic, prepared: PreparedPlan) -> tuple[str, ...]:
    traffic = one.traffic
    level = prepared.estimate.levels[traffic.group]
    wanted = asked_level(prepared.plan.seats.fabric, prepared.job.placement.packing(traffic.group).level)
    ranks = "2" if traffic.kind is Collective.SEND else f"{traffic.ranks:,}"
    fabric = prepared.plan.seats.fabric
    return (
        str(traffic.group),
        ranks,
        _where(level, fabric) + (f", not {_where(wanted, fabric)}" if level > wanted else ""),
        str(traffic.kind),
        f"{traffic.times:,}",
        scaled(traffic.size, "B"),
        str(one.algorithm),
        duration(one.seconds),
        duration(one.exposed),
        str(traffic.hidden),
    )


def _where(level: Level, fabric: Fabric) -> str:
    """In words. In a ring or torus, that is what takes the place of a pod."""
    grids = [domain.grid for domain in fabric.domains(Level.POD) if domain.grid]
    if level is not Level.POD or not grids:
        return WHERE[level]
    return "in a ring" if len(grids[0].dimensions) == 1 else "in a torus"


def _step(prepared: PreparedPlan) -> Iterator[str]:
    step = prepared.estimate.step
    parts = [
        f"{duration(step.compute)} compute",
        f"{duration(step.exposed)} exposed communication" if step.exposed else "",
        f"{duration(step.bubble)} bubble" if step.bubble else "",
        f"{duration(step.optimizer)} update",
    ]
    yield f"{duration(step.total)} = {' + '.join(filter(None, parts))}; MFU {percent(step.utilization)}"
    if prepared.calibrated:
        reached = percent(prepared.plan.chip.efficiency)
        yield f"calibrated with the measured step: matrix products reach {reached} of the peak"


def _memory(prepared: PreparedPlan) -> Iterator[str]:
    estimate, chip, model = prepared.estimate, prepared.plan.chip, prepared.plan.model
    memory = estimate.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "gathered layers": memory.working,
    }
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    words = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
    yield f"{gigabytes(memory.total)} of {gigabytes(chip.memory)} a GPU, {percent(RESERVED)} kept free: {verdict}"
    yield words + (f"; {gigabytes(memory.host)} a GPU in the host's memory" if memory.host else "")
    host = node_memory(prepared.job, model, prepared.plan.schedule)
    if host.total:
        yield f"memory checkpoints: {host.words}"
    state = f"{estimate.fewest_for_state:,} for the state alone, divided evenly"
    if estimate.fewest_gpus is None:
        yield f"no number of GPUs holds it with this tensor, context and pipeline split; {state}"
    else:
        yield f"smallest number of GPUs: {estimate.fewest_gpus:,} with this tensor, context and pipeline split; {state}"
    if not estimate.fits:
        yield _remedy(prepared)
    if not model.vocabulary:
        yield "without model.vocabulary, the memory of the logits is left out"


def _remedy(prepared: PreparedPlan) -> str:
    """What would make it fit."""
    memory, limit = prepared.estimate.memory, prepared.plan.chip.memory * (1 - RESERVED)
    model, split = prepared.plan.model, prepared.estimate.fitting_split
    if split:
        return f"it fits with tensor = {split.tensor}, pipeline = {split.pipeline} and data = {split.data}"
    if memory.activations > limit - memory.state and model.activation_checkpointing is not Checkpointing.FULL:
        return 'no other split of these GPUs fits: try activation_checkpointing = "full", or more context ranks'
    if model.sharding is not Sharding.PARAMETERS:
        return 'no other split of these GPUs fits: try parallelism.sharding = "parameters"'
    return "no other split of these GPUs fits: try model.offload, or more nodes"


def _roofline(prepared: PreparedPlan) -> Iterator[str]:
    """What each main operation waits for, with its FLOP for each byte."""
    chip = prepared.plan.chip
    limit = roofline.ridge(chip.peak, chip.memory_bandwidth)
    peaks = f"{scaled(chip.peak, 'FLOP/s')}, {scaled(chip.memory_bandwidth, 'B/s')}"
    yield f"arithmetic decides from {limit:,.0f} FLOP/B on ({peaks})"
    for kind in roofline.Bound:
        bound = [one for one in prepared.estimate.operations if one.bound is kind]
        words = ", ".join(f"{one.name} {one.intensity:,.0f}" for one in bound)
        share = min((one.attained for one in bound), default=0.0) / chip.peak
        limits = "" if kind is roofline.Bound.COMPUTE else f"; down to {percent(share)} of the peak"
        if bound:
            yield f"{kind} bound (FLOP/B): {words}{limits}"
    estimate, axes = prepared.estimate, prepared.plan.axes
    wide, few = estimate.widest_compute_bound, estimate.fewest_compute_bound_tokens
    width = f"up to tensor {wide}" if wide else "with no tensor degree"
    tokens = f"from {few:,} tokens on with tensor {axes.tensor}" if few else f"never with tensor {axes.tensor}"
    yield f"products are compute bound {width} with this micro-batch, and {tokens}"


def _pipeline(prepared: PreparedPlan) -> Iterator[str]:
    plan, estimate = prepared.plan, prepared.estimate
    stages, schedule = plan.axes.pipeline, plan.schedule
    if stages == 1:
        yield "one stage, no bubble"
        return
    kind = "interleaved" if schedule.virtual_stages > 1 else "plain"
    words = f"{kind}, {stages} stages, {schedule.micro_batches} micro-batches"
    yield f"bubble {percent(estimate.bubble_share)} of a step ({words}){_other_schedule(prepared)}"
    chunks = stages * schedule.virtual_stages
    if estimate.imbalance > 1:
        over = percent(estimate.imbalance - 1)
        words = f"{plan.model.layers} layers don't divide into {chunks} equal stages"
        yield f"{words}: the largest has {over} more than the mean"
    else:
        yield f"stages balance: {plan.model.layers // chunks} layers each"


def _other_schedule(prepared: PreparedPlan) -> str:
    """The bubble without interleaving; or with the fewest virtual stages that balance, if there are such."""
    plan = prepared.plan
    stages, micro_batches, layers = plan.axes.pipeline, plan.schedule.micro_batches, plan.model.layers
    if plan.schedule.virtual_stages > 1:
        return f"; plain: {percent(bubble_share(stages, micro_batches))}"
    most = min(layers // stages, _MOST_VIRTUAL_STAGES)
    virtual = next((v for v in range(2, most + 1) if layers % (stages * v) == 0), 0)
    if not virtual:
        return ""
    share = bubble_share(stages, micro_batches, virtual)
    return f"; interleaved with {virtual} virtual stages: {percent(share)}"


def _failures(prepared: PreparedPlan) -> Iterator[str]:
    found, plan = prepared.estimate.outlook, prepared.plan
    best = f"a checkpoint takes {duration(found.checkpoint)}, best every {duration(found.interval)} (Daly)"
    of = "the node" if plan.failures.nodes == 1 else f"one of {plan.failures.nodes:,} nodes"
    yield f"{of} fails every {duration(found.mtbf)}; {best}"
    without = f"{percent(found.goodput_without_spares)} without spares"
    if plan.failures.spares:
        spares = counted(plan.failures.spares, "spare")
        there = f"{spares}, of which one is there in {percent(found.spare_there)} of failures"
        yield f"goodput {percent(found.goodput)} with {there}; {without}"
    else:
        yield f"goodput {without}"
    yield f"a recovery takes {duration(found.recovery)} on average"


def _training(prepared: PreparedPlan) -> Iterator[str]:
    estimate, plan = prepared.estimate, prepared.plan
    yield f"{scaled(estimate.tokens_a_day, '')} tokens a day, with failures"
    if not estimate.days:
        yield "give model.tokens for the days of the whole training"
        return
    hours = scaled(plan.axes.world_size * 24 * estimate.days, "")
    price = f", {estimate.cost:,.0f} at {plan.price:g} for each" if estimate.cost else "; --price gives the cost"
    yield f"{scaled(plan.tokens, '')} tokens take {estimate.days:,.3g} days and {hours} GPU hours{price}"


def _misplacement(prepared: PreparedPlan) -> Iterator[str]:
    worst = prepared.estimate.misplacement
    if worst is None:
        yield "none: no ranks communicate"
        return
    words = f"{duration(worst.step)} a step, {worst.factor:.3g} times as long"
    yield f"costs most with {_SCATTERED[worst.group]}: {words}"


def _defaults(prepared: PreparedPlan, screen: Screen) -> Iterator[str]:
    """What rests on no word of the user or the site."""
    rows = [(one.name, one.value, one.source, one.instead) for one in prepared.defaults]
    return table(screen, ("default", "value", "from", "instead"), rows)
