"""Requests on a tree of switches: a number of leaf switches, and one pod if that is required. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Unit
from muster.launcher.allocation import spares
from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.plan import NodeRequest, Request, RequestOptions, too_large
from muster.launcher.allocation.segments import leaf_count
from muster.slurm.client.parsing.hostlist import collapse
from muster.wording import counted

MOST_PODS = 16
"""Pods of which Slurm is asked when the job would start there. Each question takes some 10 ms."""


def plan(wanted: NodeRequest, clusters: Sequence[PackedPieces]) -> RequestOptions:
    """What to ask for on a tree. Raises WrongInput if a requirement fits nowhere."""
    leaves = leaf_switches(wanted.topology.units)
    sizes = [len(leaf.nodes) for leaf in leaves]
    notes = []
    best: tuple[int, PackedPieces] | None = None
    pod: PackedPieces | None = None
    for cluster in clusters:
        if cluster.level is not Level.LEAF:
            if cluster.required:
                pod = cluster
            else:
                notes.append(f"{cluster.words}; Slurm has no option for that on a tree but a list of nodes")
        elif count := leaf_count(wanted.nodes, wanted.spares, cluster.nodes, sizes):
            best = count, cluster
        elif cluster.required:
            raise too_large(cluster, "leaf switches", sizes, wanted)
        else:
            notes.append(f"{cluster.words}; the leaf switches are too small for that")
    on_leaves = _on_leaves(wanted, clusters, best, len(leaves), notes)
    if best:
        losses = spares.on_leaves(wanted.nodes, wanted.spares, best[1], sizes)
        on_leaves = replace(on_leaves, losses=losses)
    return _in_pod(on_leaves, pod, wanted, leaves)


def _on_leaves(
    wanted: NodeRequest,
    clusters: Sequence[PackedPieces],
    best: tuple[int, PackedPieces] | None,
    leaves: int,
    notes: Sequence[str],
) -> RequestOptions:
    if not best:
        return RequestOptions(wanted.any, notes=tuple(notes))
    count, cluster = best
    required = any(one.required for one in clusters if one.level is Level.LEAF)
    if count >= leaves:
        return RequestOptions(wanted.any, notes=(f"{cluster.words}; the job needs all leaf switches", *notes))
    until = f"@{_slurm_time(wanted.wait_s)}" if wanted.wait_s is not None else ""
    words = f"at most {counted(count, 'leaf switch', 'leaf switches')}"
    notes = [f"{cluster.words}: {words}, which hold the whole job", *notes]
    if wanted.wait_s is not None:
        notes.append(
            f"the site lets a job wait {wanted.wait_s} s for that (max_switch_wait); then Slurm starts it anywhere"
        )
    strict = Request(wanted.spares, words, (f"--switches={count}{until}",))
    return RequestOptions(strict, (wanted.any,), required, tuple(notes))


def _in_pod(
    plan: RequestOptions, cluster: PackedPieces | None, wanted: NodeRequest, leaves: Sequence[Unit]
) -> RequestOptions:
    """The plan with all nodes in one pod, which `cluster` requires. Each pod with room for the job is one request."""
    pods = pods_of(wanted.topology.units, leaves)
    if cluster is None or not pods:  # a tree of two tiers is one pod
        return plan
    if max(len(pod.nodes) for pod in pods) < cluster.nodes:
        raise too_large(cluster, "pods", [len(pod.nodes) for pod in pods], wanted)
    roomy = [pod for pod in pods if len(pod.nodes) >= wanted.total][:MOST_PODS]
    if not roomy:
        why = "the job needs several pods, and Slurm has no option for that on a tree: it is checked before the start"
        return replace(plan, required=True, notes=(*plan.notes, f"{cluster.words}; {why}"))
    every = {name for unit in wanted.topology.units for name in unit.nodes}
    requests = [
        Request(
            plan.strict.spares,
            f"{plan.strict.words.replace('any nodes', 'nodes')} of pod {pod.name}",
            (*plan.strict.options, f"--exclude={collapse(sorted(every - set(pod.nodes)))}"),
        )
        for pod in roomy
    ]
    notes = (*plan.notes, f"{cluster.words}: the nodes of all other pods are excluded, because Slurm keeps to no pod")
    return RequestOptions(requests[0], (plan.strict, *plan.relaxed), True, notes, plan.losses, tuple(requests[1:]))


def leaf_switches(units: Sequence[Unit]) -> list[Unit]:
    """The smallest switches that no other one is below."""
    return list(_disjoint(unit for unit in units if unit.nodes))


def pods_of(units: Sequence[Unit], leaves: Sequence[Unit]) -> list[Unit]:
    """The switches of the second tier. Empty if one of them holds the whole network."""
    lowest = {unit.nodes for unit in leaves}
    above = [unit for unit in units if unit.nodes and unit.nodes not in lowest]
    every = {name for unit in units for name in unit.nodes}
    return [pod for pod in _disjoint(above) if set(pod.nodes) != every]


def _disjoint(units: Iterator[Unit] | Sequence[Unit]) -> Iterator[Unit]:
    seen: set[str] = set()
    for unit in sorted(units, key=lambda unit: len(unit.nodes)):
        if seen.isdisjoint(unit.nodes):
            yield unit
        seen.update(unit.nodes)


def _slurm_time(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
