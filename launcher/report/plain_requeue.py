"""What a plain requeue would have cost a job, from the job's own figures. Pure."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.goodput.intervals import Category
from muster.launcher.report.faults import ENDS_A_PLAIN_JOB, losses
from muster.launcher.report.report_data import Goodput, PlainRequeue
from muster.launcher.report.story import Story
from muster.wording import duration


def plain_requeue(story: Story, goodput: Goodput) -> PlainRequeue | None:
    """What a plain requeue would have cost; None: there was no fault that ends a plain job, or no step before it."""
    first_step = next((at for at, fact in story.facts if isinstance(fact, facts.FirstStep)), None)
    struck = {fault: loss for fault, loss in losses(story.intervals).items() if fault.kind in ENDS_A_PLAIN_JOB}
    if first_step is None or not struck:
        return None
    own = [one for one in story.intervals if one.fault is None and one.until <= first_step]
    submitted = story.gang.account.registered_at
    allocated = max((one.until for one in own if one.category is Category.QUEUE), default=submitted)
    age, words = _checkpoint_age(story, first_step, [fault.at for fault in struck])
    return PlainRequeue(
        restarts=len(struck),
        queue_s=allocated - submitted,
        start_s=first_step - allocated,
        checkpoint_age_s=age,
        checkpoint_words=words,
        actual_s=sum(sum(loss.parts.values()) for loss in struck.values()),
        nodes=len(story.ranks) or story.gang.spec.nodes,
        gpus_per_node=goodput.gpus_per_node,
        price=goodput.price,
    )


def _checkpoint_age(story: Story, first_step: float, struck: list[float]) -> tuple[float, str]:
    """How old the newest durable checkpoint is when a fault comes, on average, and how that was found."""
    saved = [at for at, fact in story.facts if isinstance(fact, facts.FlushEnded) and fact.path and at >= first_step]
    every_s = story.gang.spec.durable_every_s
    if every_s:
        return every_s / 2, f"half of durable_every, {duration(every_s)}"
    ages = [at - max((when for when in saved if when <= at), default=first_step) for at in struck if at > first_step]
    mean = sum(ages) / len(ages) if ages else 0.0
    if saved:
        return mean, "measured: from the newest durable checkpoint to each fault"
    return mean, "no durable checkpoint was written: from the first step to each fault"
