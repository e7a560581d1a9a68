"""A plan without a price: where the ranks of a job would be, if job.toml does not say how large its model is. Pure.

A usual model would give numbers that look like the job's own. So there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muster.daemon.host.plain_text import plain
from muster.fabric.cost.accelerators import Accelerator
from muster.fabric.estimate.spread import Seats, loosest_level
from muster.fabric.groups.axes import write_order
from muster.fabric.groups.rank_groups import GroupKind, rank_groups
from muster.fabric.model.level import Level
from muster.fabric.placement.weights import usual_weights
from muster.launcher.output.screen import Screen
from muster.launcher.output.table import labelled
from muster.launcher.plan.assumptions import Defaults, PlanOptions
from muster.launcher.plan.hardware import accelerator_of
from muster.launcher.plan.prepare import SlurmFabric, seats_of
from muster.launcher.plan.screen import WHERE, title
from muster.launcher.spec.spec import Job
from muster.wording import counted

WHY = (
    "job.toml does not say how large the model is: give model.parameters, or model.layers and model.hidden_size, for "
    "the time of a step, memory and cost"
)


@dataclass(frozen=True, slots=True)
class UnpricedPlan:
    """Where the groups of a job would lie."""

    job: Job
    seats: Seats
    network: str
    """Where the network comes from, in words."""
    levels: Mapping[GroupKind, Level]
    """The tier that joins the ranks of each group, for the kinds of groups with more than one rank."""


def is_priced(job: Job, options: PlanOptions) -> bool:
    """Whether the job gets a price: its size is known, or an option asks for a price and so for the size."""
    model = job.model
    asked = options.measured_step or options.efficiency or options.price or options.in_network
    return bool(model.model_fields_set or asked)


def unpriced(
    job: Job, options: PlanOptions, table: Mapping[str, Accelerator], slurm: SlurmFabric | None, no_slurm: str
) -> UnpricedPlan:
    """The places of the job's ranks. The arguments are those of `prepare.prepare`.

    Raises:
        WrongInput: the accelerator is not known.
    """
    defaults = Defaults()
    _, entry = accelerator_of(job, options.accelerator, slurm.gpu if slurm else "", table, defaults)
    seats, network = seats_of(job, usual_weights(job.axes), entry, slurm, no_slurm, defaults)
    # Without experts, their data groups are the data groups.
    kinds = [kind for kind in GroupKind if kind is not GroupKind.EXPERT_DATA or job.axes.expert > 1]
    every = {kind: rank_groups(job.axes, kind) for kind in kinds}
    levels = {kind: loosest_level(groups, seats) for kind, groups in every.items() if len(groups[0]) > 1}
    return UnpricedPlan(job, seats, network, levels)


def lines(plan: UnpricedPlan, screen: Screen) -> Iterator[str]:
    """The screen."""
    job = plan.job
    ranks = counted(job.axes.world_size, "rank", form=",")
    yield from screen.sentence(plain(f"{title(job, ranks)}; nothing is queued"))
    groups = [
        (f"{kind} group", f"{counted(len(rank_groups(job.axes, kind)[0]), 'rank', form=',')} {WHERE[level]}")
        for kind, level in plan.levels.items()
    ]
    rows = [("network", plan.network), ("order", write_order(job.axes.order)), *groups, ("no price", WHY)]
    yield from labelled(screen, rows)


def to_dict(plan: UnpricedPlan) -> dict[str, Any]:
    """The plan as JSON: the keys of a priced one as far as they are known, and why there is no price."""
    job = plan.job
    groups = {kind.value: level.word for kind, level in plan.levels.items()}
    return {
        "job": job.name,
        "nodes": job.nodes,
        "spares": job.spares,
        "gpus": job.axes.world_size,
        "network": plan.network,
        "groups": groups,
        "no_price": WHY,
    }
