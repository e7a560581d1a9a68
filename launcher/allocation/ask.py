"""Asks Slurm for its network, and when the possible requests would start."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.daemon.host import clock
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.allocation.choice import Estimate, choose
from muster.launcher.allocation.clusters import NodeCluster, clusters_of
from muster.launcher.allocation.request import Plan, plan_request
from muster.slurm.client.types import Slurm, Unknown

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

QUESTION_TIMEOUT_S = 5.0
"""Seconds for each question. Without an answer, the job is queued as it is."""
_OWN_SHAPE = ("--switches", "--segment", "--nodelist", "-w", "--nodefile", "-F")
"""Options with which a user gives the job a shape. Muster adds none then."""
_PARTITION = ("--partition", "-p")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the job asks of Slurm beside its own options."""

    spares: int
    options: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """For the script: why, one line each."""
    reason: str = ""
    """For the user, in one line. Empty: nothing to say."""


def asking(job: Job, options: Sequence[str]) -> tuple[NodeCluster, ...]:
    """What the job's groups ask for. Empty if they ask for nothing, or the user has given the job a shape."""
    if job.slurm.switches or _given((*job.slurm.options, *options), _OWN_SHAPE) is not None:
        return ()
    return clusters_of(job.axes, job.placement, job.nodes, virtual_stages=job.parallelism.virtual_stages)


async def allocate(
    job: Job, clusters: Sequence[NodeCluster], options: Sequence[str], script: str, slurm: Slurm
) -> Allocation:
    """What to ask for, so that `clusters` get what they ask for.

    Args:
        options: sbatch options of the command line.
        script: the job's script without that.

    Raises:
        WrongInput: a requirement can't be kept anywhere in Slurm's network.
    """
    topologies, wait_s = await asyncio.gather(
        slurm.topologies(timeout_s=QUESTION_TIMEOUT_S), slurm.max_switch_wait_s(timeout_s=QUESTION_TIMEOUT_S)
    )
    if isinstance(topologies, Unknown):
        return Allocation(job.spares, reason=f"groups are not packed: Slurm does not answer: {topologies.reason}")
    partition = _given((*job.slurm.options, *options), _PARTITION) or job.slurm.partition
    topology = topology_of(topologies, partition)
    plan = plan_request(clusters, job.nodes, job.spares, topology, None if isinstance(wait_s, Unknown) else wait_s)
    if not plan.relaxed:
        return Allocation(plan.strict.spares, plan.strict.options, plan.notes)
    choice = choose(plan, await _estimates(plan, job, script, slurm), job.placement.if_not_available, clock.wall())
    notes = plan.notes if choice.request is plan.strict else (*plan.notes, choice.reason)
    return Allocation(choice.request.spares, choice.request.options, notes, choice.reason)


async def _estimates(plan: Plan, job: Job, script: str, slurm: Slurm) -> list[Estimate]:
    """When each request would start: the strict one, then the relaxed ones."""
    with tempfile.NamedTemporaryFile("w", prefix="muster-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        return await asyncio.gather(
            *(
                slurm.estimate_start(
                    Path(file.name),
                    (f"--nodes={job.nodes + request.spares}", *request.options),
                    cwd=Path.cwd(),
                    env=os.environ,
                    timeout_s=QUESTION_TIMEOUT_S,
                )
                for request in (plan.strict, *plan.relaxed)
            )
        )


def topology_of(topologies: Sequence[SlurmTopology], partition: str | None) -> SlurmTopology:
    """The topology of the first of the partitions that a job names, else the default."""
    first = (partition or "").partition(",")[0]
    named = (topology for topology in topologies if first and first in topology.partitions)
    return next(named, next((topology for topology in topologies if topology.default), topologies[0]))


def _given(options: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the last option that is one of `names`. None if there is none."""
    words = [word for option in options for word in option.split(maxsplit=1)]
    found = None
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        for name in names:
            if key == name or word == name:
                found = value if equals else "".join(words[at + 1 : at + 2])
            elif not name.startswith("--") and not word.startswith("--") and word.startswith(name):
                found = word.removeprefix(name)
    return found
