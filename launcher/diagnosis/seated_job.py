"""A job that runs: what job.toml said of it, and which node carries which ranks in which network. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from pydantic import ValidationError

from muster.fabric.estimate.spread import Seats
from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, Groups, fits_in_blocks, pipeline_pairs, rank_groups
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.placement.weights import Weights
from muster.launcher.plan.model_of_job import weights_of
from muster.launcher.plan.places import asked_level
from muster.launcher.spec.estimate_tables import read_job
from muster.launcher.spec.spec import Job
from muster.v1.common_pb2 import JobSpec
from muster.v1.diagnosis_pb2 import JobMeasurements


@dataclass(frozen=True)
class SeatedJob:
    """A job and its places."""

    job: Job
    seats: Seats

    @cached_property
    def axes(self) -> Axes:
        """The axes of the ranks that there are: an elastic job may have fewer replicas than it asked for."""
        ranks = len(self.seats.nodes) * self.seats.local_ranks
        axes = self.job.axes
        return replace(axes, data=max(1, ranks * axes.data // axes.world_size))

    @cached_property
    def weights(self) -> Weights:
        """What one group of each kind sends in a step."""
        return weights_of(self.job)

    def groups(self, kind: GroupKind) -> Groups:
        """The groups of a kind; for the pipeline, the pairs that send to each other. None has one rank only."""
        if kind is GroupKind.PIPELINE:
            return pipeline_pairs(self.axes, virtual_stages=self.job.parallelism.virtual_stages)
        return tuple(group for group in rank_groups(self.axes, kind) if len(group) > 1)

    def nodes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The nodes of these ranks, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(map(self.seats.node_of, ranks)))

    def ring_of(self, ranks: tuple[int, ...]) -> list[tuple[str, str]]:
        """Sender and receiver of each link between nodes that a group's ring has. Pipelines send both ways."""
        nodes = [self.seats.node_of(rank) for rank in ranks]
        ring = [*pairwise(nodes), (nodes[-1], nodes[0])]
        return [(one, other) for one, other in ring if one != other]

    def level_of(self, nodes: tuple[str, ...]) -> Level:
        """The tightest tier that joins all of these nodes."""
        first, *others = nodes
        return max((self.seats.fabric.level_between(first, other) for other in others), default=Level.NODE)

    def asked(self, kind: GroupKind) -> Level:
        """The tier in which the job wants each group of a kind, as far as this network has it.

        A group that no node holds, and that need not be in one, is as near as can be in a leaf.
        """
        packing = self.job.placement.packing(kind)
        level = asked_level(self.seats.fabric, packing.level)
        fits = fits_in_blocks(self.axes, kind, self.seats.local_ranks)
        if level is Level.NODE and not packing.required and not fits:
            return asked_level(self.seats.fabric, Level.LEAF)
        return level


def job_of(spec: JobSpec) -> Job | None:
    """What the coordinator knows of job.toml; None if that is no job, for this version of Muster."""
    try:
        return Job.model_validate(read_job(spec))
    except (ValidationError, ValueError, TypeError, RecursionError):  # any user may have written it
        return None


def nodes_of(measured: JobMeasurements) -> tuple[str, ...]:
    """The node of group rank 0, of group rank 1 and so on. Empty if the job has no ranks now."""
    local = measured.spec.ranks_per_node or 1
    ranked = sorted(measured.gang.ranks, key=lambda one: one.rank)
    return tuple(one.node for one in ranked[::local])


def seated(measured: JobMeasurements, job: Job, fabric: Fabric, nics: int) -> SeatedJob | None:
    """The job in its places; None if it has none, or if the network lacks one of its nodes."""
    nodes = nodes_of(measured)
    if not nodes or not set(nodes) <= fabric.nodes or len(nodes) * job.local_ranks % _replica(job):
        return None
    return SeatedJob(job, Seats(fabric, nodes, job.local_ranks, nics))


def _replica(job: Job) -> int:
    return job.axes.world_size // job.axes.data
