"""Asks Slurm for its network, and when the possible requests would start."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.daemon.host import clock
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.allocation import free_nodes
from muster.launcher.allocation.choice import Estimate, choose, shrunken, smaller_jobs, starts_now
from muster.launcher.allocation.clusters import PackedPieces, clusters_of
from muster.launcher.allocation.plan import Request, RequestOptions, check_count, check_partitions, check_spread, doubts
from muster.launcher.allocation.request import plan_request
from muster.launcher.allocation.site_domains import NOTHING_SAID, SiteDomains, load_domains, names_of
from muster.launcher.fabric import ReportedDomains
from muster.launcher.spec.job_options import all_options
from muster.launcher.spec.placement import IfNotAvailable
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE
from muster.slurm.client.sbatch_options import SbatchOption, value_of
from muster.slurm.client.submit_environment import for_sbatch
from muster.slurm.client.types import Node, Slurm, StartEstimate, Unknown

if TYPE_CHECKING:
    from muster.launcher.spec.spec import Job

QUESTION_TIMEOUT_S = 5.0
"""Seconds for each question. Without an answer, the job is queued as it is."""
_OWN_SHAPE = frozenset({"switches", "segment", "nodelist", "nodefile"})
"""Options with which a user gives the job a shape. Muster adds none then."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the job asks of Slurm beside its own options."""

    job: Job
    """With fewer nodes, if the job was shrunk."""
    spares: int
    options: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """For the script: why, one line each."""
    reason: str = ""
    """For the user, in one line. Empty: nothing to say."""
    strict: bool = False
    """Whether Slurm is asked for all that the groups ask."""
    warnings: tuple[str, ...] = ()
    """For the user, one line each: what a loss may do, what is free now, and what is wrong with the site's file."""
    later: bool = False
    """Whether all that the groups ask for would start later than now, or never, and something starts one day."""


def has_own_shape(job: Job, options: Iterable[SbatchOption]) -> bool:
    """Whether the user has given the job a shape. `options`: those of the command line."""
    return any(option.name in _OWN_SHAPE for option in all_options(job, options))


def asking(job: Job) -> tuple[PackedPieces, ...]:
    """What the job's groups ask for. Empty if they ask for nothing."""
    return clusters_of(job.axes, job.placement, job.nodes, virtual_stages=job.parallelism.virtual_stages)


async def allocate(
    job: Job,
    clusters: Sequence[PackedPieces],
    options: Sequence[SbatchOption],
    script: str,
    slurm: Slurm,
    reported: Callable[[], Awaitable[ReportedDomains | None]] | None = None,
) -> Allocation:
    """What to ask for, so that `clusters` get what they ask for.

    Args:
        options: sbatch options of the command line.
        script: the job's script without that.
        reported: asks for the NVLink domains that nodes report; called only where that decides.

    Raises:
        WrongInput: a requirement can't be kept anywhere in Slurm's network.
    """
    partition = value_of(all_options(job, options), "partition")
    topologies, wait_s, _ = await asyncio.gather(
        slurm.topologies(timeout_s=QUESTION_TIMEOUT_S),
        slurm.max_switch_wait_s(timeout_s=QUESTION_TIMEOUT_S),
        _check_partition(job, slurm, partition),
    )
    if isinstance(topologies, Unknown):
        reason = f"groups are not packed: Slurm does not answer: {topologies.reason}" if clusters else ""
        return Allocation(job, job.spares, reason=reason)
    await _check_flat(job, slurm, topology_of(topologies, partition))
    site = await _site(slurm, topologies)
    needs_nvlink = any(cluster.required and cluster.asked == "nvlink" for cluster in clusters)
    if reported and needs_nvlink and not site.names_nvlink:
        site = replace(site, reported=await reported())
    unknown = check_spread(job.placement, job.nodes, job.spares, site)
    question = _SlurmQuery(
        slurm,
        script,
        topology_of(topologies, partition),
        None if isinstance(wait_s, Unknown) else wait_s,
        site,
        partition,
    )
    found = await _choose(question, job, clusters)
    unknown += doubts(site, clusters)
    if found.later:
        unknown += await question.free_nodes()
    return replace(found, warnings=tuple(filter(None, (*found.warnings, *unknown, site.problem))))


async def _check_partition(job: Job, slurm: Slurm, partition: str | None) -> None:
    """Raises WrongInput if the job's partitions are too small. Slurm itself refuses one that it does not have."""
    if not partition:
        return
    found = await slurm.partitions(timeout_s=QUESTION_TIMEOUT_S)
    names = partition.split(",")
    if not isinstance(found, Unknown) and found.keys() >= set(names):
        check_partitions(job.nodes, job.spares, [found[name] for name in names])


async def _check_flat(job: Job, slurm: Slurm, topology: SlurmTopology) -> None:
    """Raises WrongInput if Slurm has too few nodes. Other networks name their nodes (`plan.check_size`)."""
    if topology.units or topology.members:
        return
    nodes = await slurm.nodes(timeout_s=QUESTION_TIMEOUT_S)
    if isinstance(nodes, Unknown):
        return
    check_count(job.nodes, job.spares, len(nodes))


async def _site(slurm: Slurm, topologies: Sequence[SlurmTopology]) -> SiteDomains:
    """What the site's file says. Slurm is asked for its nodes only if the topologies do not name them all."""
    if not FABRIC_FILE.exists():
        return NOTHING_SAID
    site = load_domains(names_of(topologies))
    if site != NOTHING_SAID and not site.problem:
        return site
    nodes = await slurm.nodes(timeout_s=QUESTION_TIMEOUT_S)
    return site if isinstance(nodes, Unknown) else load_domains(nodes)


async def _choose(question: _SlurmQuery, job: Job, clusters: Sequence[PackedPieces]) -> Allocation:
    """The request that is made, of those that are possible."""
    plan = await question.with_first_to_start(job, question.plan(job, clusters))
    mode, losses = job.placement.if_not_available, (plan.losses,) if plan.losses else ()
    if not plan.relaxed and mode != "shrink":
        return Allocation(job, plan.strict.spares, plan.strict.options, plan.notes, strict=True, warnings=losses)
    estimates = await question.estimates(job, plan.strict, *plan.relaxed)
    now = clock.wall()
    later = not isinstance(estimates[0], Unknown) and not starts_now(estimates[0], now)
    if mode == "shrink" and later:
        smaller = await _largest_that_starts_now(question, job, shaped=bool(clusters))
        if smaller:
            less, request = smaller
            reason = shrunken(less, job, estimates[0], now)
            return Allocation(
                less, request.spares, request.options, (*plan.notes, reason), reason, strict=True, later=True
            )
    choice = choose(plan, estimates, mode, now)
    if mode == "shrink" and later:
        choice = replace(choice, reason=f"{choice.reason}; not even one data-parallel replica would start now")
    request, as_asked = choice.request, choice.request is plan.strict
    notes = plan.notes if as_asked else (*plan.notes, choice.reason)
    later = later and any(isinstance(estimate, StartEstimate) for estimate in estimates)
    return Allocation(job, request.spares, request.options, notes, choice.reason, as_asked, losses, later)


def if_worse(allocation: Allocation, clusters: Sequence[PackedPieces], *, own_shape: bool) -> IfNotAvailable:
    """What the job does if Slurm hands out nodes on which its groups lie wider than asked.

    It takes them if they are what Slurm is asked for: if another try would bring nothing better.

    Args:
        allocation: what Slurm is asked for.
        clusters: what the job's groups ask for.
        own_shape: whether the user has given the job a shape.
    """
    required = any(cluster.required for cluster in clusters)
    if not allocation.strict or not (allocation.options or own_shape or required):
        return "relax"
    return allocation.job.placement.if_not_available or ("wait" if required else "relax")


@dataclass(frozen=True, slots=True)
class _SlurmQuery:
    """What is the same for every size of a job."""

    slurm: Slurm
    script: str
    topology: SlurmTopology
    max_switch_wait_s: int | None
    site: SiteDomains
    partition: str | None

    def plan(self, job: Job, clusters: Sequence[PackedPieces]) -> RequestOptions:
        """What to ask for. Raises WrongInput if a requirement can't be kept."""
        return plan_request(clusters, job.nodes, job.spares, self.topology, self.max_switch_wait_s, self.site)

    async def with_first_to_start(self, job: Job, plan: RequestOptions) -> RequestOptions:
        """The plan with that one of its equal requests as the strict one that starts first."""
        if not plan.others:
            return plan
        requests = (plan.strict, *plan.others)
        starts = [
            (estimate.start, at)
            for at, estimate in enumerate(await self.estimates(job, *requests))
            if isinstance(estimate, StartEstimate)
        ]
        return replace(plan, strict=requests[min(starts)[1]], others=()) if starts else plan

    async def free_nodes(self) -> list[str]:
        """What is free now, in one line. Empty if Slurm does not say."""
        nodes = await self.slurm.nodes(timeout_s=QUESTION_TIMEOUT_S)
        if isinstance(nodes, Unknown):
            return []
        found = [node for node in nodes.values() if isinstance(node, Node)]
        return [free_nodes.in_words(self.topology, found, self.partition)]

    async def estimates(self, job: Job, *requests: Request) -> list[Estimate]:
        """When each request of `job` would start."""
        with tempfile.NamedTemporaryFile("w", prefix="muster-", suffix=".sbatch") as file:
            file.write(self.script)
            file.flush()
            return await asyncio.gather(
                *(
                    self.slurm.estimate_start(
                        Path(file.name),
                        (f"--nodes={job.nodes + request.spares}", *request.options),
                        cwd=Path.cwd(),
                        env=for_sbatch(os.environ),
                        timeout_s=QUESTION_TIMEOUT_S,
                    )
                    for request in requests
                )
            )


async def _largest_that_starts_now(question: _SlurmQuery, job: Job, *, shaped: bool) -> tuple[Job, Request] | None:
    """The largest of the smaller jobs that starts as soon as it is queued, and its request. By bisection: a larger job
    does not start earlier.

    Args:
        shaped: whether the groups ask for a shape.
    """
    jobs, best = smaller_jobs(job), None
    low, high = 0, len(jobs)
    while low < high:
        middle = (low + high) // 2
        smaller = jobs[middle]
        strict = question.plan(smaller, asking(smaller) if shaped else ()).strict
        (estimate,) = await question.estimates(smaller, strict)
        if starts_now(estimate, clock.wall()):
            best, low = (smaller, strict), middle + 1
        else:
            high = middle
    return best


def topology_of(topologies: Sequence[SlurmTopology], partition: str | None) -> SlurmTopology:
    """The topology of the first of the partitions that a job names, else the default."""
    first = (partition or "").partition(",")[0]
    named = (topology for topology in topologies if first and first in topology.partitions)
    return next(named, next((topology for topology in topologies if topology.default), topologies[0]))
