"""What nodes report of themselves, and the fabric that is refined with it.

Slurm knows switches and blocks, a site knows racks. Nodes know their sockets, GPUs and adapters, and in which NVLink
domain of several nodes they are. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Nic, Node
from muster.fabric.sources.tiers import Tiers
from muster.wording import listed

_NO_ADAPTERS: Mapping[str, float] = MappingProxyType({})
_SHOWN = 5
"""Nodes that a warning names."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node has. `gpus`, `sockets`, `nics`: as in `Node`. A socket is a NUMA node here.

    nvlink_domain: the cluster's id and the clique, as one name: nodes with the same one share NVLink. Empty: the node's
        GPUs reach no other node by NVLink, are not all in one domain, or nobody knows.
    adapter_bandwidth: of the slowest of the adapters that are nearest to GPUs, as negotiated. Bytes a second in one
        direction; 0: not known.
    """

    gpus: int = 0
    sockets: tuple[int, ...] = ()
    nics: tuple[Nic, ...] = ()
    nvlink_domain: str = ""
    adapter_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Refined:
    """The refined fabric, and what did not fit into it."""

    fabric: Fabric
    warnings: tuple[str, ...] = ()


def refine(fabric: Fabric, reports: Mapping[str, NodeReport], tiers: Tiers | None = None) -> Refined:
    """`fabric` with what its nodes report of themselves. Nodes that it lacks are left out.

    What the fabric says already stays: a site's file knows better. An NVLink domain that does not fit into the tree,
    because it crosses switches or holds some, is left out with a warning.
    """
    known = {name: report for name, report in reports.items() if name in fabric.nodes}
    root, warnings = _with_domains(fabric.root, _domains(fabric, known, tiers or Tiers()))
    details = {node.name: node for node in fabric.details}
    for name, report in known.items():
        if report.gpus or report.nics:
            details[name] = _with_hardware(details.get(name) or Node(name), report)
        if uplink := _slower_uplink(fabric, name, report.adapter_bandwidth):
            details[name] = replace(details.get(name) or Node(name), uplink=uplink)
    return Refined(Fabric(root, tuple(details[name] for name in sorted(details))), tuple(warnings))


def with_nvlink_domains(
    fabric: Fabric, domains: Mapping[str, str], adapters: Mapping[str, float] = _NO_ADAPTERS
) -> Fabric:
    """`fabric` with the NVLink domains of several nodes that nodes have reported: by node, "" for none; and with the
    links of nodes whose adapters are slow: bytes a second by node, 0 where it is not known.
    """
    reports = {
        node: NodeReport(nvlink_domain=domain, adapter_bandwidth=adapters.get(node, 0.0))
        for node, domain in domains.items()
        if domain or adapters.get(node)
    }
    return refine(fabric, reports).fabric if reports else fabric


def _slower_uplink(fabric: Fabric, name: str, bandwidth: float) -> Link | None:
    """The node's link, if its adapters are slower than what the site's file or the tier says; None if they are not. A
    rate says what an adapter has negotiated, and never makes a tier faster."""
    if not bandwidth:
        return None
    tier = next(domain.link for domain in reversed(fabric.path(name)) if domain.level >= Level.LEAF)
    said = fabric.node(name).uplink or tier
    return Link(said.latency, bandwidth) if bandwidth < min(said.bandwidth, tier.bandwidth) else None


def _domains(fabric: Fabric, reports: Mapping[str, NodeReport], tiers: Tiers) -> list[Domain]:
    """The NVLink domains of two nodes or more."""
    members: dict[str, set[str]] = {}
    for name, report in reports.items():
        if report.nvlink_domain and all(around.level is not Level.NVLINK for around in fabric.path(name)):
            members.setdefault(report.nvlink_domain, set()).add(name)
    link, ratio = tiers.link(Level.NVLINK), tiers.ratio(Level.NVLINK)
    return [
        Domain(Level.NVLINK, frozenset(nodes), link, (), ratio, name=name)
        for name, nodes in sorted(members.items())
        if len(nodes) > 1
    ]


def _with_domains(root: Domain, domains: Sequence[Domain]) -> tuple[Domain, list[str]]:
    """The tree with each of `domains` below the smallest domain that holds it, and a warning for each that has no
    place."""
    if not domains:
        return root, []
    warnings: list[str] = []
    holder = {name: child for child in root.children for name in child.nodes}
    inside: dict[int, list[Domain]] = {}
    own = list[Domain]()
    for domain in domains:
        holders = {id(child): child for name in domain.nodes if (child := holder.get(name))}
        if len(holders) == 1 and domain.nodes <= (child := next(iter(holders.values()))).nodes:
            inside.setdefault(id(child), []).append(domain)
        elif holders or root.grid:
            warnings.append(_misfit(domain, root))
        else:
            own.append(domain)
    children = []
    for child in root.children:
        changed, more = _with_domains(child, inside.get(id(child), ()))
        children.append(changed)
        warnings += more
    return replace(root, children=(*children, *own)), warnings


def _misfit(domain: Domain, around: Domain) -> str:
    kind = "which is a ring or torus and has no parts" if around.grid else "and crosses switches or blocks there"
    return (
        f"the NVLink domain of {listed(sorted(domain.nodes), ', ')} is left out: it lies in {around.label}, {kind}; "
        "a Slurm block that is an NVLink domain fits"
    )


def _with_hardware(node: Node, report: NodeReport) -> Node:
    """What the fabric knows of a node comes first."""
    if node.gpus and node.gpus != report.gpus:
        return node
    return replace(node, gpus=report.gpus, sockets=node.sockets or report.sockets, nics=node.nics or report.nics)
