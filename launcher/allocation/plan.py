"""What Slurm can be asked for: the request that the groups want, and those that they can do with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.fabric.model.node import FailureDomain
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.site_domains import NOTHING_SAID, SiteDomains
from muster.launcher.errors import WrongInput
from muster.launcher.fabric import ReportedDomains
from muster.launcher.spec.placement import Placement
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE
from muster.slurm.client.types import Partition
from muster.wording import counted

NODES_OF_A_SPARE = 8
"""A preference is worth one more spare for so many nodes. A requirement is worth any number."""
NETWORK = "Slurm's network"
_SITES_OWN = {FailureDomain.RACK: "racks", FailureDomain.POWER: "power feeds"}
"""What only fabric.toml knows, in the plural."""


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
class RequestOptions:
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
class NodeRequest:
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


def check_size(wanted: NodeRequest) -> None:
    """Raises WrongInput if the network has too few nodes for the job, whatever their state."""
    units, members = wanted.topology.units, wanted.topology.members
    check_count(
        wanted.nodes, wanted.spares, len(members) or len({name for unit in units for name in unit.nodes if name})
    )


def check_count(nodes: int, spares: int, have: int, of: str = NETWORK) -> None:
    """Raises WrongInput if there are too few nodes. `have`: how many there are; 0: not known. `of`: what has them."""
    if 0 < have < nodes + spares:
        raise WrongInput(
            f"nodes + spares = {nodes} + {spares} = {nodes + spares}: {of} has {counted(have, 'node')}",
            f"choose {have} or less in all{'' if of == NETWORK else ', or another partition'}. Nothing was queued",
        )


def check_partitions(nodes: int, spares: int, partitions: Sequence[Partition]) -> None:
    """Raises WrongInput if each of the partitions that a job names has too few nodes, whatever their state. A job runs
    in one of them."""
    largest = max(partitions, key=lambda one: len(one.nodes))
    check_count(nodes, spares, len(largest.nodes), f"partition {largest.name!r}")


def check_nvlink(wanted: NodeRequest, clusters: Sequence[PackedPieces]) -> list[str]:
    """Why groups that shall be in an NVLink domain are not, if the domains are known and too small.

    Raises:
        WrongInput: such a group is required.
    """
    site, notes = wanted.site, []
    sizes = site.nvlink_sizes
    for cluster in clusters:
        if cluster.asked != "nvlink" or site.nvlink_blocks or cluster.nodes <= max(sizes, default=0):
            continue
        if not sizes:
            _check_reported(cluster, site.reported)
            continue
        if cluster.required:
            raise too_large(cluster, "NVLink domains", sizes, wanted)
        notes.append(f"{cluster.kind} groups of {cluster.nodes} nodes are larger than the NVLink domains of the site")
    return notes


def _check_reported(cluster: PackedPieces, reported: ReportedDomains | None) -> None:
    """Refuses a required group that is larger than each domain, if all nodes have reported theirs."""
    if not cluster.required or reported is None or reported.silent or cluster.nodes <= max(reported.sizes, default=0):
        return
    have = f"the largest NVLink domain that nodes report has {counted(max(reported.sizes, default=0), 'node')}"
    raise WrongInput(
        f"placement.{cluster.kind} = 'require nvlink' can't be kept: a group has {cluster.nodes} nodes, and "
        + (have if reported.sizes else "no node reports an NVLink domain of several nodes"),
        "choose smaller degrees, or 'prefer nvlink'. Nothing was queued",
    )


def doubts(site: SiteDomains, clusters: Sequence[PackedPieces]) -> list[str]:
    """What the job requires and nobody can check before it starts, one line each."""
    reported, found = site.reported, []
    for cluster in clusters:
        if cluster.asked != "nvlink" or not cluster.required or site.names_nvlink or reported is None:
            continue
        if reported.silent and cluster.nodes > max(reported.sizes, default=0):
            found.append(
                f"no NVLink domain of {cluster.nodes} nodes is known, which placement.{cluster.kind} requires, and "
                f"{counted(reported.silent, 'node has', 'nodes have')} not reported theirs: on other nodes the job "
                "ends with exit code 92"
            )
    return found


def check_spread(placement: Placement, nodes: int, spares: int, site: SiteDomains) -> list[str]:
    """What the job requires to be kept apart, and nobody knows: one line each.

    Args:
        spares: those that the job asks for.

    Raises:
        WrongInput: the site has too few racks or power feeds for it.
    """
    found = []
    for key, wishes, count, what in (
        ("spread_replicas", placement.spread_replicas, min(nodes, 2), "a node and the holder of its second copy"),
        ("spread_spares", placement.spread_spares, spares, counted(spares, "spare")),
    ):
        for wish in wishes:
            if not wish.required or count < 2 or wish.domain not in _SITES_OWN:
                continue
            plural = _SITES_OWN[wish.domain]
            if wish.domain not in site.apart:
                if not site.problem:
                    found.append(f"placement.{key} = '{wish}' is not kept: {FABRIC_FILE} names no {plural}")
            elif site.apart[wish.domain] < count:
                raise WrongInput(
                    f"placement.{key} = '{wish}' can't be kept: {what} need {count} {plural}, and the site has "
                    f"{site.apart[wish.domain]}",
                    f"choose 'prefer {wish.domain.value}'{' or fewer spares' * (key == 'spread_spares')}. "
                    "Nothing was queued",
                )
    return found


def added_spares(added: int, total: str, reason: str) -> str:
    """The note for spares that a shape adds: "2 more spares: 30 + 0 nodes are no multiple of 16"."""
    return f"{counted(added, 'more spare')}: {total} nodes are {reason}"


def too_large(cluster: PackedPieces, units: str, sizes: Sequence[int], wanted: NodeRequest) -> WrongInput:
    """The refusal of a requirement that no part of the network can keep."""
    have = f"{len(sizes)} {units} of at most {counted(max(sizes, default=0), 'node')}"
    return WrongInput(
        f"placement.{cluster.kind} = 'require {cluster.asked}' can't be kept: {cluster.pieces} times "
        f"{cluster.nodes} nodes and {counted(wanted.spares, 'spare')} don't fit into {have}",
        f"choose smaller degrees, or 'prefer {cluster.asked}'. Nothing was queued",
    )
