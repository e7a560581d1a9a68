"""What the coordinator must know to seat a job's ranks: what groups send in one step, and what is spread. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from muster.fabric.groups.rank_groups import GroupKind
from muster.v1.common_pb2 import GroupTraffic, Spreading

if TYPE_CHECKING:
    from muster.launcher.spec import placement
    from muster.launcher.spec.spec import Job


def group_traffic(job: Job) -> Iterator[GroupTraffic]:
    """One entry for each kind of group. None for a job whose ranks are replicas and nothing else."""
    if not job.parallelism.has_groups:
        return
    from muster.fabric.placement.weights import NO_TRAFFIC  # most jobs don't need the model of costs
    from muster.launcher.plan.weights_of_job import weights_of

    weights = weights_of(job)
    for kind in GroupKind:
        weight, packing = weights.get(kind, NO_TRAFFIC), job.placement.packing(kind)
        yield GroupTraffic(
            kind=kind,
            messages=weight.messages,
            bytes=weight.size,
            packed_in=packing.level.word,
            required=packing.required,
        )


def spreading(job: Job) -> Spreading:
    """What a node and its buddy, and what two spares shall not share."""
    return Spreading(replicas=_words(job.placement.spread_replicas), spares=_words(job.placement.spread_spares))


def _words(asked: Iterable[placement.Spreading]) -> Iterator[str]:
    for one in asked:
        yield f"require {one.domain.value}" if one.required else one.domain.value
