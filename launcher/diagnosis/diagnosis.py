"""The whole diagnosis of a job: what is known, what is not, and what to change. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.fabric.estimate.estimate import Plan
from muster.fabric.estimate.step import StepTime
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.launcher.diagnosis import links, steps
from muster.launcher.diagnosis.groups import PlacedKind, TornGroup, kinds_that_pass, placed_kinds, torn_groups
from muster.launcher.diagnosis.links import MeasuredLink, SlowLink
from muster.launcher.diagnosis.seated_job import SeatedJob
from muster.launcher.diagnosis.steps import Earlier, Parts, SlowestRank
from muster.v1.api_pb2 import NodeView
from muster.v1.diagnosis_pb2 import JobMeasurements

_WELL = ("FIT", "UNHEARD")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says. `here`: in the present places. `planned`: in those that `muster plan` shows."""

    here: StepTime
    planned: StepTime
    tier: Level | None
    """The tier that the measured wait speaks of; None: nothing is measured, or no tier explains it."""
    by_tier: dict[Level, float]
    """The predicted wait for gradients if their groups lay in this tier, in seconds."""
    over_slow: float
    """The predicted wait if the slowest link that was measured holds them up, in seconds; 0: no link is slow."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network that the diagnosis counts with. `source`: in words. `speeds_known`: the site has given them."""

    fabric: Fabric
    source: str
    speeds_known: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a job."""

    measured: JobMeasurements
    network: Network
    kinds: list[PlacedKind]
    torn: list[TornGroup]
    links: list[MeasuredLink]
    slow: list[SlowLink]
    passing: list[tuple[GroupKind, ...]]
    """The kinds of groups that wait for each of them in each step."""
    reports: list[NodeView]
    """The nodes with ranks of which something is known that is not well."""
    slow_uplinks: dict[str, float]
    """Nodes whose own link is known to be slower than their tier's: bytes a second."""
    parts: Parts | None
    slowest: SlowestRank | None
    earlier: Earlier | None
    prediction: Prediction | None
    unknown: list[str] = field(default_factory=list)
    """What can't be said, and why."""
    last_words: list[str] = field(default_factory=list)
    """The last lines of the log of the rank that has ended the job; empty: it goes on, or no rank has ended it."""


def diagnose(
    measured: JobMeasurements, seated: SeatedJob | None, network: Network, plan: Plan | None, unknown: list[str]
) -> Diagnosis:
    """Puts together what is known.

    Args:
        measured: what the coordinator has.
        seated: the job in its places; None if they are not known.
        network: where these places are.
        plan: the job as `muster plan` has it; None if job.toml does not describe the model.
        unknown: what the caller could not find out, and why.
    """
    kinds = placed_kinds(seated) if seated else []
    judged = judged_links(measured, network)
    parts, slow = steps.parts_of(measured.ranks), links.slow_links(judged)
    on_ranks = [node for node in measured.gang.nodes if node.role == "rank"]
    return Diagnosis(
        measured,
        network,
        kinds,
        torn_groups(seated, kinds) if seated else [],
        judged,
        slow,
        [kinds_that_pass(seated, kinds, one) if seated else () for one in slow],
        [node for node in on_ranks if node.verdict not in _WELL or node.reason],
        _slow_uplinks(seated) if seated else {},
        parts,
        steps.slowest_rank(measured),
        steps.earlier_of(measured),
        _prediction(plan, seated, parts, slow) if plan and seated else None,
        [*unknown, *_unknown(measured, kinds, judged)],
    )


def judged_links(measured: JobMeasurements, network: Network) -> list[MeasuredLink]:
    """The transfers between nodes of this network, each with what is usual for it."""
    fabric = network.fabric
    rates = [one for one in measured.links if {one.from_node, one.to_node} <= fabric.nodes]

    def rating(sender: str, receiver: str) -> float | None:
        return fabric.link(sender, receiver).bandwidth if network.speeds_known else None

    return links.judged(rates, fabric.level_between, rating)


def _slow_uplinks(seated: SeatedJob) -> dict[str, float]:
    """Nodes whose link to their switch has negotiated down, or was measured below its tier."""
    fabric, found = seated.seats.fabric, {}
    for name in seated.seats.nodes:
        own, tier = fabric.node(name).uplink, fabric.domain(name, Level.LEAF).link
        if own and own.bandwidth < tier.bandwidth:
            found[name] = own.bandwidth
    return found


def _prediction(plan: Plan, seated: SeatedJob, parts: Parts | None, slow: list[SlowLink]) -> Prediction:
    here = steps.with_seats(plan, seated.seats)
    by_tier = steps.waits_by_tier(here, seated.seats)
    tier = steps.tier_of_wait(parts.wait, by_tier) if parts else None
    over_slow = steps.wait_over(here, seated.seats, slow[0].rate) if slow else 0.0
    planned = steps.predicted(plan, plan.seats)
    return Prediction(steps.predicted(here, seated.seats), planned, tier, by_tier, over_slow)


def _unknown(measured: JobMeasurements, kinds: list[PlacedKind], judged: list[MeasuredLink]) -> list[str]:
    found = []
    gang = measured.gang
    if gang.final or gang.phase != "RUNNING":
        found.append(f"how fast it is now: it is {gang.phase}, and no rank trains")
    elif not measured.step_s:
        found.append("the time of a step: its ranks have reported too few steps, or don't use the checkpoint library")
    elif not measured.ranks:
        found.append("what a step waits for: its ranks report no times (docs/CHECKPOINT.md says which models do)")
    if not kinds and gang.ranks:
        found.append("whether groups are packed: it has no [parallelism] whose groups span ranks")
    if not judged:
        found.append("what links carry: no copy of a checkpoint between nodes was large enough to time")
    return found
