"""How fast the running generation trains, what its ranks report, and when it will be done. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from statistics import median

from muster.daemon.coordinator.core.state.events import NodeNumber, NodeTraining
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.view_parts.measured_steps import measured_steps
from muster.daemon.host.metric_series import NumberPoint, merged_nodes
from muster.daemon.transport.job_limits import MAX_SECONDS
from muster.v1 import api_pb2
from muster.v1.common_pb2 import RankNumber

_TOKENS = "tokens"


def add_training(view: api_pb2.GangView, gang: Gang, seen: ObservedGang, *, brief: bool) -> None:
    """Fill it in, unless no rank of the running generation has finished a step or says anything. `brief`: without what
    takes a look at each rank."""
    reports = list(_reports(gang, seen))
    if gang.phase is not Phase.RUNNING or not (reports or seen.last_step[0] == gang.newest.generation):
        return
    training = view.training
    training.SetInParent()
    if seen.last_step[0] != gang.newest.generation:
        _add_logged_steps(view, gang, seen)
    step_s = _middle(report.step_s for report in reports)
    if not brief:
        measured = measured_steps(gang, seen)
        step_s = training.step_s = measured.step_s or step_s
        training.compute_s, training.wait_s = measured.compute_s, measured.wait_s
        training.fetch_s = _middle(rank.fetch_s or 0.0 for rank in measured.ranks)
        training.metrics.extend(_metric(name, numbers) for name, numbers in sorted(_by_name(reports).items()))
    training.last_step = max((report.last_step for report in reports), default=0)
    # What the script does between steps is in the pace, and not in the time of a step.
    if between_s := seen.pace.median_step_s or step_s:
        training.steps_per_s = 1 / between_s
        left_s = max(0, training.last_step - view.step) * between_s
        if 0 < left_s <= MAX_SECONDS:  # a later moment has no date
            training.done_s = _stepped_at(seen) + left_s
        _add_utilization(training, gang, reports, between_s)


def _add_logged_steps(view: api_pb2.GangView, gang: Gang, seen: ObservedGang) -> None:
    """No rank reports a finished step. The steps are those that the numbers name: the newest one of each node."""
    steps = {seat.node: report.step for seat in gang.roster.seats if (report := _report(gang, seen, seat.node))}
    view.step = max(steps.values(), default=0) or view.step
    for rank in view.ranks:
        rank.step = rank.step or steps.get(rank.node, 0)
    newest = view.recoveries[-1] if view.recoveries else None
    if newest is not None and newest.generation == gang.newest.generation and not newest.first_step_s:
        first_at_s = min((report.first_at_s for report in _reports(gang, seen) if report.first_at_s), default=0.0)
        newest.first_step_s = max(first_at_s, newest.running_s or newest.started_s) if first_at_s else 0.0


def _add_utilization(view: api_pb2.TrainingView, gang: Gang, reports: list[NodeTraining], between_s: float) -> None:
    """MFU and tokens, as far as job.toml or the script says what a step is. Each rank has one GPU."""
    spec, said = gang.spec, json.loads(gang.account.shown_spec)
    ranks = len(gang.roster.seats) * spec.ranks_per_node
    flops = said.get("flops_per_step", 0.0) or sum(report.flops for report in reports)
    if ranks and (peak := said.get("peak_flops", 0.0)):
        view.mfu = flops / (between_s * ranks) / peak  # the product of all three may be 0
    tokens = said.get("tokens_per_step", 0.0)
    if reported := next((metric.median for metric in view.metrics if metric.name == _TOKENS), 0.0):
        # The ranks of one replica of the model read the same batch.
        tokens = reported * ranks / (spec.tensor * spec.context * spec.pipeline)
    if ranks:
        view.tokens_per_gpu_s = max(0.0, tokens) / (between_s * ranks)


def _stepped_at(seen: ObservedGang) -> float:
    """When the newest step was reported. It does not move with the clock: watchers are not sent a view for that."""
    return seen.last_step_at or max((agent.reported_at for agent in seen.agents.values()), default=0.0)


def _reports(gang: Gang, seen: ObservedGang) -> Iterator[NodeTraining]:
    """What the nodes of the running generation have reported of it."""
    for seat in gang.roster.seats:
        if (training := _report(gang, seen, seat.node)) is not None:
            yield training


def _report(gang: Gang, seen: ObservedGang, node: str) -> NodeTraining | None:
    training = seen.status(node).training
    return training if training is not None and training.generation == gang.newest.generation else None


def _by_name(reports: Iterable[NodeTraining]) -> dict[str, list[NodeNumber]]:
    found: dict[str, list[NodeNumber]] = {}
    for report in reports:
        for number in report.numbers:
            found.setdefault(number.name, []).append(number)
    return found


def _metric(name: str, numbers: Iterable[NodeNumber]) -> RankNumber:
    """One number of all nodes. The medians are put together as in the series of the job."""
    whole = merged_nodes(
        NumberPoint(one.step, one.ranks, one.least, one.median, one.greatest, one.least_rank, one.greatest_rank)
        for one in numbers
    )
    return RankNumber(
        name=name,
        step=whole.step,
        ranks=whole.values,
        least=whole.least,
        median=whole.median,
        greatest=whole.greatest,
        least_rank=whole.least_rank,
        greatest_rank=whole.greatest_rank,
    )


def _middle(values: Iterable[float]) -> float:
    """The median of those that are known."""
    known = [value for value in values if value > 0]
    return median(known) if known else 0.0
