"""The options that make Slurm give a job the nodes that its groups ask for, and the options for less. Pure.

What Slurm 24.11 and 26.05 do with them (tests/cluster/test_topologies.py):

- A tree takes `--switches=COUNT@WAIT`: the most leaf switches of the whole job. When the wait is over, Slurm starts the
  job anywhere. A count that no part of the cluster has is accepted all the same, and blocks the queue for the wait.
- Blocks take `--segment=NODES`: each segment is within one block, or within aggregated blocks if it is larger than a
  block; Slurm 24.11 has no place for a larger one. Slurm refuses a segment that does not divide the number of nodes.
  Without the option, Slurm waits for the fewest blocks that hold the job: a job that takes what
  there is asks for segments of 1.
- A torus has places for the configured shapes only: Slurm never starts a job of another number of nodes.
- A ring gives consecutive nodes in any case. On a flat network Slurm knows of no distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from muster.fabric.model.level import Level
from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.launcher.allocation.clusters import NodeCluster
from muster.launcher.allocation.segments import leaf_count, segment_of, smaller_segments
from muster.launcher.errors import WrongInput

_NODES_OF_A_SPARE = 8
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


def plan_request(
    clusters: Sequence[NodeCluster],
    nodes: int,
    spares: int,
    topology: SlurmTopology,
    max_switch_wait_s: int | None,
) -> Plan:
    """The plan for a job of `nodes` nodes and `spares` more, whose groups ask for `clusters`.

    Args:
        max_switch_wait_s: the longest time for which a job may wait for its switches. None: not known.

    Raises:
        WrongInput: a requirement can't be kept anywhere in this network.
    """
    job = _Job(nodes, spares, topology, max_switch_wait_s)
    if topology.kind is Kind.TREE:
        return _on_tree(job, clusters)
    if topology.kind is Kind.BLOCK:
        return _on_blocks(job, clusters)
    if topology.kind is Kind.TORUS:
        return _on_torus(job)
    if topology.kind is Kind.RING:
        return Plan(Request(spares, "consecutive nodes of one ring"), notes=("a ring gives consecutive nodes",))
    why = topology.problem or "Slurm knows of no switches or blocks"
    return Plan(Request(spares, "any nodes"), notes=(f"the groups are not packed by Slurm: {why}",))


@dataclass(frozen=True, slots=True)
class _Job:
    nodes: int
    spares: int
    topology: SlurmTopology
    wait_s: int | None

    @property
    def any(self) -> Request:
        return Request(self.spares, "any nodes")


def _on_tree(job: _Job, clusters: Sequence[NodeCluster]) -> Plan:
    leaves = [len(unit.nodes) for unit in _leaf_switches(job.topology.units)]
    notes = []
    best: tuple[int, NodeCluster] | None = None
    for cluster in clusters:
        if cluster.level is not Level.LEAF:
            notes.append(f"{cluster.words}; Slurm has no option for that on a tree")
        elif count := leaf_count(job.nodes, job.spares, cluster.nodes, leaves):
            best = count, cluster
        elif cluster.required:
            raise _too_large(cluster, "leaf switches", leaves, job)
        else:
            notes.append(f"{cluster.words}; the leaf switches are too small for that")
    if not best:
        return Plan(job.any, notes=tuple(notes))
    count, cluster = best
    required = any(one.required for one in clusters if one.level is Level.LEAF)
    if count >= len(leaves):
        return Plan(job.any, notes=(f"{cluster.words}; the job needs all leaf switches", *notes))
    until = f"@{_slurm_time(job.wait_s)}" if job.wait_s is not None else ""
    words = f"at most {count} leaf switch{'es' * (count != 1)}"
    notes.insert(0, f"{cluster.words}: {words}, which hold the whole job")
    if job.wait_s is not None:
        notes.append(
            f"the site lets a job wait {job.wait_s} s for that (max_switch_wait); then Slurm starts it anywhere"
        )
    strict = Request(job.spares, words, (f"--switches={count}{until}",))
    return Plan(strict, (job.any,), required, tuple(notes))


def _leaf_switches(units: Sequence[Unit]) -> Iterator[Unit]:
    seen: set[str] = set()
    for unit in sorted(units, key=lambda unit: len(unit.nodes)):
        if unit.nodes and seen.isdisjoint(unit.nodes):
            yield unit
        seen.update(unit.nodes)


def _on_blocks(job: _Job, clusters: Sequence[NodeCluster]) -> Plan:
    units = job.topology.units
    smallest = min((len(unit.nodes) for unit in units if not unit.aggregated), default=0)
    block = job.topology.base_block or smallest
    pod = min((len(unit.nodes) for unit in units if unit.aggregated), default=0)
    most = len({node for unit in units for node in unit.nodes})
    notes = []
    best: tuple[int, int, NodeCluster] | None = None
    for cluster in clusters:
        limit = block if cluster.level is Level.LEAF else pod
        if not limit:  # without aggregated blocks, the whole network is one pod
            continue
        if best and cluster.level is not best[2].level:
            notes.append(f"{cluster.words}; Slurm takes one size of segments, and tighter groups have it")
            continue
        largest = most if cluster.required else min(most, job.nodes + job.spares + job.nodes // _NODES_OF_A_SPARE)
        if found := segment_of(job.nodes, job.spares, cluster.nodes, limit, largest):
            best = *found, cluster
        elif cluster.required:
            raise _too_large(cluster, "blocks", [limit] * (most // limit), job)
        else:
            notes.append(f"{cluster.words}; {job.nodes + job.spares} nodes are no such segments in blocks of {limit}")
    scattered = Request(job.spares, "any nodes", ("--segment=1",))
    if not best:
        fewest = Request(job.spares, "the fewest blocks that hold the job")
        return Plan(fewest, (scattered,) if clusters else (), notes=tuple(notes))
    total, segment, cluster = best
    added = total - job.nodes - job.spares
    words = f"segments of {segment} node{'s' * (segment != 1)}, each within one {cluster.level.word}"
    notes.insert(0, f"{cluster.words}: {words}")
    if added:
        total_words = f"{job.nodes} + {job.spares} nodes are no multiple of {segment}"
        notes.append(f"{added} more spare{'s' * (added != 1)}: {total_words}, and Slurm refuses that")
    strict = Request(job.spares + added, words, (f"--segment={segment}",))
    relaxed = tuple(
        Request(job.spares, f"segments of {size} nodes" if size > 1 else "any nodes", (f"--segment={size}",))
        for size in smaller_segments(job.nodes + job.spares, cluster.nodes)
    )
    required = any(one.required for one in clusters if one.level is cluster.level)
    return Plan(strict, relaxed or (scattered,), required, tuple(notes))


def _on_torus(job: _Job) -> Plan:
    sizes = sorted({prod(shape) for unit in job.topology.units for shape in unit.shapes})
    wanted = job.nodes + job.spares
    total = next((size for size in sizes if size >= wanted), 0)
    known = ", ".join(map(str, sizes)) or "none"
    if not total:
        raise WrongInput(
            f"nodes + spares = {wanted}: the torus takes jobs of these numbers of nodes: {known}", "Nothing was queued"
        )
    added = total - wanted
    notes = [f"the torus takes jobs of these numbers of nodes: {known}"]
    if added:
        notes.append(f"{added} more spare{'s' * (added != 1)}: {wanted} nodes is no such number")
    return Plan(Request(job.spares + added, f"a shape of {total} nodes"), notes=tuple(notes))


def _too_large(cluster: NodeCluster, units: str, sizes: Sequence[int], job: _Job) -> WrongInput:
    have = f"{len(sizes)} {units} of at most {max(sizes, default=0)} nodes"
    return WrongInput(
        f"placement.{cluster.kind} = 'require {cluster.level.word}' can't be kept: {cluster.pieces} times "
        f"{cluster.nodes} nodes and {job.spares} spares don't fit into {have}",
        f"choose smaller degrees, or 'prefer {cluster.level.word}'. Nothing was queued",
    )


def _slurm_time(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
