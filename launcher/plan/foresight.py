"""What `muster submit` would say of a job on this network: a refusal, or what the loss of a node may do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.allocation.ask import asking, has_own_shape
from muster.launcher.allocation.plan import check_spread
from muster.launcher.allocation.request import plan_request
from muster.launcher.allocation.site_domains import SiteDomains
from muster.launcher.errors import WrongInput
from muster.launcher.plan.node_memory import why_too_little
from muster.launcher.spec.spec import Job
from muster.slurm.client.parsing import gres
from muster.slurm.client.types import Node
from muster.wording import counted


def foresee(
    job: Job, topology: SlurmTopology, site: SiteDomains, usable: Sequence[Node], partitions: Collection[str]
) -> Iterator[str]:
    """One line for each thing that a user wants to know before the job is queued.

    Args:
        topology: the one of the job's partition.
        usable: the nodes in service in that partition.
        partitions: all that Slurm has.
    """
    partition = job.slurm.partition
    if partition and partition not in partitions:
        yield f"Slurm has no partition {partition!r}; it has {', '.join(sorted(partitions)) or 'none'}"
        return
    most = max((gres.count_gpus(node.gres) or 0 for node in usable), default=0)
    if usable and job.gpus_per_node and most < job.gpus_per_node:
        where = f"partition {partition}" if partition else "Slurm"
        yield f"gpus_per_node = {job.gpus_per_node}: nodes in service of {where} have {counted(most, 'GPU')} at most"
    if words := why_too_little(job, usable):
        yield f"muster submit refuses this job: {words}"
        return
    if job.nodes == 1 or has_own_shape(job, ()):
        return
    try:
        yield from check_spread(job.placement, job.nodes, job.spares, site)
        plan = plan_request(asking(job), job.nodes, job.spares, topology, None, site)
    except WrongInput as error:
        hint = error.hint.removesuffix("Nothing was queued").rstrip(". ")
        yield f"muster submit refuses this job: {error.message}" + (f"; {hint}" if hint else "")
        return
    if plan.losses:
        yield plan.losses
