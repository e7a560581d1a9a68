"""Where the ranks of a job that has no nodes yet would be: in Slurm's network, or in a usual one. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from muster.fabric.cost.accelerators import Accelerator
from muster.fabric.estimate.spread import Seats
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node
from muster.fabric.placement.maps.rank_map import place
from muster.fabric.placement.node_groups import node_groups
from muster.fabric.placement.weights import Weights
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import USUAL_LINKS, Tiers
from muster.launcher.spec.spec import Job

LEAF_NODES = 32
"""Nodes below a leaf of a usual fabric: with 8 adapters a node and leaves of 64 ports, 8 leaves serve 32 nodes, one
rail each. They are one leaf domain.
"""


MOST_PLACED = 4_096
"""Nodes of a job up to which its places are sought as at a start, within 2 s. Larger jobs are packed in the network's
order."""


def tiers_of_accelerator(entry: Accelerator) -> Tiers:
    """The links that this accelerator usually has, without oversubscription."""
    speed = {Level.NODE: entry.link, Level.NVLINK: entry.link}
    links = {level: Link(link.latency, speed.get(level, entry.nic)) for level, link in USUAL_LINKS.items()}
    return Tiers(links)


def usual_fabric(nodes: int, entry: Accelerator) -> Fabric:
    """A fat tree of `nodes` nodes with full bisection, and NVLink domains of several nodes if the accelerator has
    them.
    """
    names = [f"n{index}" for index in range(nodes)]
    sets = [NodeSet(frozenset(names[at : at + LEAF_NODES])) for at in range(0, nodes, LEAF_NODES)]
    rack = entry.domain // entry.per_node
    if rack > 1:
        sets = [NodeSet(frozenset(names[at : at + rack]), nvlink=True) for at in range(0, nodes, rack)]
    return with_gpu_links(fabric_of(sets, names, tiers_of_accelerator(entry)), entry)


def usual_domains(entry: Accelerator) -> str:
    """The smallest domains of `usual_fabric` in words."""
    rack = entry.domain // entry.per_node
    return f"NVLink domains of {rack} nodes" if rack > 1 else f"leaves of {LEAF_NODES} nodes"


def with_gpu_links(fabric: Fabric, entry: Accelerator) -> Fabric:
    """The fabric with this accelerator's links within nodes and NVLink domains."""
    link = tiers_of_accelerator(entry).link(Level.NODE)
    known = {node.name: node for node in fabric.details}
    details = (replace(known.get(name, Node(name)), gpu_link=link) for name in sorted(fabric.nodes))
    return Fabric(_with_nvlink(fabric.root, tiers_of_accelerator(entry).link(Level.NVLINK)), tuple(details))


def _with_nvlink(domain: Domain, link: Link) -> Domain:
    children = tuple(_with_nvlink(child, link) for child in domain.children)
    return replace(domain, children=children, link=link if domain.level is Level.NVLINK else domain.link)


def placed_seats(job: Job, weights: Weights, fabric: Fabric, usable: Collection[str], nics: int) -> Seats | None:
    """The seats that Muster would give the job if all usable nodes were free. None: there are not enough.

    Args:
        job: the job.
        weights: what each kind of group sends.
        fabric: the network.
        usable: nodes in service.
        nics: network adapters of a node, where the fabric does not know them.
    """
    nodes = frozenset(usable) & fabric.nodes
    if len(nodes) < job.nodes or job.nodes > MOST_PLACED:
        return packed_seats(fabric, nodes, job.nodes, job.local_ranks, nics)
    packing = {kind: job.placement.packing(kind) for kind in GroupKind}
    groups = node_groups(
        job.axes,
        job.local_ranks,
        weights,
        virtual_stages=job.parallelism.virtual_stages,
        required={kind: wish.level for kind, wish in packing.items() if wish.required},
        preferred={kind: wish.level for kind, wish in packing.items()},
    )
    return Seats(fabric, place(fabric, groups, nodes, job.nodes).seats, job.local_ranks, nics)


def packed_seats(fabric: Fabric, usable: Collection[str], nodes: int, local_ranks: int, nics: int) -> Seats | None:
    """Seats on the tightest domain with enough usable nodes, its fullest parts first. None: there are not enough."""
    usable = frozenset(usable)
    domains = [domain for domain in fabric.root.walk() if len(domain.nodes & usable) >= nodes]
    if not domains:
        return None
    tightest = min(domains, key=lambda domain: (domain.level, len(domain.nodes & usable)))
    order = _in_order(tightest, usable)
    return Seats(fabric, tuple(order[:nodes]), local_ranks, nics)


def _in_order(domain: Domain, usable: frozenset[str]) -> list[str]:
    """The usable nodes of a domain, part by part, the part with most of them first."""
    parts = sorted(domain.children, key=lambda child: -len(child.nodes & usable))
    found = [node for child in parts for node in _in_order(child, usable)]
    own = sorted(domain.own_nodes & usable, key=lambda name: (len(name), name))
    return [*found, *own]


def asked_level(fabric: Fabric, wanted: Level) -> Level:
    """The tier that `wanted` means in this fabric: without pods, a pod is the next looser tier that there is."""
    if wanted < Level.LEAF:
        return Level.NVLINK if wanted is Level.NVLINK and fabric.domains(Level.NVLINK) else Level.NODE
    return min(domain.level for domain in fabric.root.walk() if domain.level >= wanted)
