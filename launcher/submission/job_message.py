"""The job as the coordinator and the agents get it: job.toml, what its groups send in a step, and what is spread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from muster.fabric.groups.rank_groups import GroupKind
from muster.launcher.spec.estimate_tables import write_tables
from muster.launcher.submission.script import node_options
from muster.v1.common_pb2 import GroupTraffic, JobSpec, Spreading

if TYPE_CHECKING:
    from muster.launcher.spec import placement
    from muster.launcher.spec.placement import IfNotAvailable
    from muster.launcher.spec.spec import Job
    from muster.slurm.client.sbatch_options import SbatchOption


def job_message(job: Job, options: Sequence[SbatchOption]) -> JobSpec:
    """The whole message. `options`: those of sbatch on the command line."""
    message = job.to_proto(work_dir=os.getcwd())
    message.node_options.extend(node_options(job, options))
    message.traffic.extend(group_traffic(job))
    message.estimate_tables = write_tables(job)
    message.spreading.CopyFrom(spreading(job))
    _add_arithmetic(message, job)
    if job.model.parameters and job.checkpoint.memory:
        from muster.launcher.plan.node_memory import needed_memory  # few jobs need the model of costs

        needed = needed_memory(job)
        message.memory_bytes = round(needed.total) if needed else 0
    return message


def _add_arithmetic(message: JobSpec, job: Job) -> None:
    """What a step computes, and what the GPUs could."""
    if not (job.model.model_fields_set or job.slurm.gres):
        return
    from muster.launcher.plan.arithmetic import arithmetic_of  # most jobs don't say

    found = arithmetic_of(job)
    message.flops_per_step, message.tokens_per_step, message.peak_flops = found.flops, found.tokens, found.peak


def lacks_peak(message: JobSpec, job: Job) -> bool:
    """Whether only the peak of the GPUs is missing for MFU: job.toml asks for GPUs and names no type of them."""
    is_known = message.flops_per_step or job.env.get("MUSTER_COUNT_FLOPS")
    return bool(is_known and not message.peak_flops and (job.gpus_per_node or job.slurm.gres))


def add_choice(message: JobSpec, job: Job, choice: IfNotAvailable) -> None:
    """Tells the coordinator what follows if Slurm hands out worse nodes."""
    if choice == "relax":
        return
    message.if_worse, message.retries = choice, job.placement.retries
    if choice == "shrink":
        from muster.launcher.allocation.choice import smaller_jobs  # few jobs need it

        message.smaller.extend(smaller.nodes for smaller in smaller_jobs(job))


def group_traffic(job: Job) -> Iterator[GroupTraffic]:
    """One entry for each kind of group. None for a job whose ranks are replicas and nothing else."""
    if not job.parallelism.has_groups:
        return
    from muster.fabric.placement.weights import NO_TRAFFIC  # most jobs don't need the model of costs
    from muster.launcher.plan.model_of_job import weights_of

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
