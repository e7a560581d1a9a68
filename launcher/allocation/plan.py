"""What Slurm can be asked for: the request that the groups want, and those that they can do with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.allocation.clusters import NodeCluster
from muster.launcher.allocation.site_domains import NOTHING_SAID, SiteDomains
from muster.launcher.errors import WrongInput

NODES_OF_A_SPARE = 8
"""A preference is worth one more spare for so many nodes. A requirement is worth any number."""


@dataclass(frozen=True, slots=True)
class Request:
    """One way to ask for the nodes."""

    spares: int
    """All spares, those that the shape adds too."""
    words: str
    """What is asked for: "at most 2 leaf switches"."""
    options: tuple[str, ...] = ()
    """More options for sbatch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask Slurm for."""

    strict: Request
    """What the groups ask for."""
    relaxed: tuple[Request, ...] = ()
    """What they can do with, the best first. Empty if nothing can be relaxed."""
    required: bool = False
    """Whether the job must not start otherwise."""
    notes: tuple[str, ...] = ()
    """Why, in words, one line each."""
    losses: str = ""
    """What the loss of a node may do to groups, in words. Empty: a spare can be near."""
    others: tuple[Request, ...] = ()
    """Other requests that are as good as `strict`: the one that starts first is made."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The numbers of a job, and where it shall run."""

    nodes: int
    spares: int
    topology: SlurmTopology
    wait_s: int | None
    """The longest time for which a job may wait for its switches. None: not known."""
    site: SiteDomains = NOTHING_SAID

    @property
    def total(self) -> int:
        """Nodes that the job has, if the shape adds none."""
        return self.nodes + self.spares

    @property
    def any(self) -> Request:
        """The request without a shape."""
        return Request(self.spares, "any nodes")


def check_size(wanted: Wanted) -> None:
    """Raises WrongInput if the network has too few nodes for the job, whatever their state."""
    units, members = wanted.topology.units, wanted.topology.members
    have = len(members) or len({name for unit in units for name in unit.nodes if name})
    if 0 < have < wanted.total:
        raise WrongInput(
            f"nodes + spares = {wanted.nodes} + {wanted.spares} = {wanted.total}: Slurm's network has {have} nodes",
            f"choose {have} or less in all. Nothing was queued",
        )


def check_nvlink(wanted: Wanted, clusters: Sequence[NodeCluster]) -> list[str]:
    """Why groups that shall be in an NVLink domain are not, if the site names domains and they are too small.

    Raises:
        WrongInput: such a group is required.
    """
    sizes, notes = wanted.site.nvlink_sizes, []
    for cluster in clusters:
        if cluster.asked != "nvlink" or not sizes or wanted.site.nvlink_blocks or cluster.nodes <= max(sizes):
            continue
        if cluster.required:
            raise too_large(cluster, "NVLink domains", sizes, wanted)
        notes.append(f"{cluster.kind} groups of {cluster.nodes} nodes are larger than the NVLink domains of the site")
    return notes


def added_spares(added: int, total: str, reason: str) -> str:
    """The note for spares that a shape adds: "2 more spares: 30 + 0 nodes are no multiple of 16"."""
    return f"{added} more spare{'s' * (added != 1)}: {total} nodes are {reason}"


def too_large(cluster: NodeCluster, units: str, sizes: Sequence[int], wanted: Wanted) -> WrongInput:
    """The refusal of a requirement that no part of the network can keep."""
    have = f"{len(sizes)} {units} of at most {max(sizes, default=0)} nodes"
    return WrongInput(
        f"placement.{cluster.kind} = 'require {cluster.asked}' can't be kept: {cluster.pieces} times "
        f"{cluster.nodes} nodes and {wanted.spares} spares don't fit into {have}",
        f"choose smaller degrees, or 'prefer {cluster.asked}'. Nothing was queued",
    )
