"""Which request is made: what the groups ask for, or less, if that would start at once: worse nodes or fewer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from muster.launcher.allocation.plan import Request, RequestOptions
from muster.launcher.errors import WrongInput
from muster.launcher.output.screen import time_with_zone
from muster.launcher.spec.placement import IfNotAvailable
from muster.launcher.spec.spec import Job
from muster.slurm.client.types import NeverStarts, StartEstimate, Unknown

Estimate = StartEstimate | NeverStarts | Unknown
SAME_START_S = 60.0
"""Seconds. A start that is later by less is no reason to take worse nodes."""

FAR_S = 366 * 86400.0
"""Seconds. Slurm names years like 2154 if jobs without a time limit come first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The request that is made, and why."""

    request: Request
    reason: str
    """One line for the user. Empty if there was nothing to choose."""


def choose(plan: RequestOptions, estimates: Sequence[Estimate], wanted: IfNotAvailable | None, now: float) -> Choice:
    """Chooses between the strict request and the relaxed ones.

    Args:
        estimates: when each would start: of the strict request, then of each relaxed one, in order.
        wanted: what the job says. A job that can't be shrunk waits. None: wait for what is required, relax what is
            preferred.
        now: Unix seconds.

    Raises:
        WrongInput: what is required can never start, and less could.
    """
    strict, *others = estimates
    starts = [
        (estimate.start, request)
        for estimate, request in zip(others, plan.relaxed, strict=True)
        if isinstance(estimate, StartEstimate)
    ]
    mode = wanted or ("wait" if plan.required else "relax")
    if isinstance(strict, Unknown):
        return Choice(plan.strict, f"asks for {plan.strict.words}; Slurm does not say when it starts: {strict.reason}")
    if not starts:
        return Choice(plan.strict, f"asks for {plan.strict.words}" + _when(strict, now))
    soonest = min(start for start, _ in starts)
    at, best = next((start, request) for start, request in starts if start <= soonest + SAME_START_S)
    if isinstance(strict, NeverStarts):
        if mode != "relax":
            raise WrongInput(
                f"Slurm has no place for {plan.strict.words}: {strict.reason}",
                f"with placement.if_not_available = 'relax' the job gets {best.words}, and starts "
                f"{_clock(at, now)}. Nothing was queued",
            )
        return Choice(best, f"asks for {best.words}: Slurm has no place for {plan.strict.words} ({strict.reason})")
    if strict.start <= soonest + SAME_START_S:
        return Choice(plan.strict, f"asks for {plan.strict.words}" + _when(strict, now))
    later = f"{plan.strict.words} would start {_clock(strict.start, now)}, {best.words} {_clock(at, now)}"
    if mode != "relax":
        return Choice(plan.strict, f"waits: {later} (placement.if_not_available = 'relax' takes that)")
    return Choice(best, f"relaxes: {later} (placement.if_not_available = 'wait' waits)")


def starts_now(estimate: Estimate, now: float) -> bool:
    """Whether a job with this estimate starts as soon as it is queued."""
    return isinstance(estimate, StartEstimate) and estimate.start <= now + SAME_START_S


def smaller_jobs(job: Job) -> list[Job]:
    """The job with fewer whole copies of the model, the smallest first: those that are valid, and not below min_nodes.

    Empty if the job has one copy.
    """
    copy = job.axes.world_size // job.axes.data
    given = job.model_dump(exclude={"gpus"}, exclude_defaults=True)
    found = []
    for nodes in range(job.min_nodes or 1, job.nodes):
        if nodes * job.local_ranks % copy:
            continue
        split = {**given.get("parallelism", {}), "data": nodes * job.local_ranks // copy}
        try:
            found.append(Job.model_validate({**given, "nodes": nodes, "parallelism": split}))
        except ValidationError:
            continue  # for example, the copies would not divide the global batch
    return found


def shrunken(smaller: Job, whole: Job, strict: Estimate, now: float) -> str:
    """The reason for the user: fewer copies of the model start at once."""
    later = f"would start {_clock(strict.start, now)}" if isinstance(strict, StartEstimate) else "have no place"
    return (
        f"shrinks to {smaller.axes.data} of {whole.axes.data} data-parallel replicas, {smaller.nodes} of {whole.nodes} "
        f"nodes: they start now, all {later} (placement.if_not_available = 'wait' waits)"
    )


def _when(estimate: StartEstimate | NeverStarts, now: float) -> str:
    if isinstance(estimate, NeverStarts):
        return f", which never starts as things are: {estimate.reason}"
    return f", starts {_clock(estimate.start, now)}"


def _clock(start: float, now: float) -> str:
    """The time with its date and zone."""
    if start <= now + SAME_START_S:
        return "now"
    if start > now + FAR_S:
        return "in more than a year, as Slurm expects"
    return f"at {time_with_zone(start)}"
