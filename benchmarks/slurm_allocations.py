"""Nodes that a real Slurm hands out on a fragmented site, in its own order. For `bench_placement`.

One controller with virtual nodes (`slurm/testcluster/virtual_nodes.py`) has the tree of a site as topology/tree. Other
jobs hold most nodes: whole leaves and parts of others ("leaves"), or nodes everywhere ("scattered"). Slurm chooses the
nodes of each job. Their order is that of the job's node list, by which Slurm numbers nodes and tasks
(SLURM_JOB_NODELIST, SLURM_NODEID, SLURM_PROCID).

Slurm orders them by name. So the names count: they follow the switches on some sites ("along"), and cross them on
others ("across"), where for example a node has the number of its place in a rack.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.fabric.model.fabric import Fabric
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.slurm.client.parsing.hostlist import collapse, expand
from muster.slurm.testcluster import virtual_nodes as virtual
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.waiting import wait_until

NAMINGS = ("along", "across")
FREE = ("leaves", "scattered")
FREE_SHARE = 1.5
"""Free nodes of a fragmented site, as a multiple of the largest job: Slurm has a choice."""
_PARTITION = "tree"
_WAIT_S = 60.0


@dataclass(frozen=True)
class SiteShape:
    """A tree of pods of leaves."""

    leaf_nodes: int
    pod_leaves: int
    pods: int
    tiers: Tiers

    def leaves(self, naming: str) -> list[list[str]]:
        """The nodes of each leaf."""
        count = self.pod_leaves * self.pods
        names = virtual.names(count * self.leaf_nodes)
        if naming == "across":
            return [names[at::count] for at in range(count)]
        return [names[at : at + self.leaf_nodes] for at in range(0, len(names), self.leaf_nodes)]

    def fabric(self, leaves: Sequence[Sequence[str]]) -> Fabric:
        """The fabric with these leaves."""
        names = [name for leaf in leaves for name in leaf]
        pods = [leaves[at : at + self.pod_leaves] for at in range(0, len(leaves), self.pod_leaves)]
        sets = [NodeSet(frozenset(leaf)) for leaf in leaves]
        sets += [NodeSet(frozenset(name for leaf in pod for name in leaf)) for pod in pods]
        return fabric_of(sets, names, self.tiers)


@dataclass(frozen=True)
class Allocation:
    """The nodes of one job."""

    naming: str
    free: str
    """What other jobs have left."""
    fabric: Fabric
    nodes: tuple[str, ...]
    """In Slurm's order."""


def allocations(shape: SiteShape, sizes: Sequence[int], draws: int) -> Iterator[Allocation]:
    """A job of each of the `sizes` on each of `draws` fragmented sites, for each naming and each kind of site."""
    for naming in NAMINGS:
        leaves, chance = shape.leaves(naming), random.Random(naming)
        fabric = shape.fabric(leaves)
        spec = virtual.cluster_of(
            len(fabric.nodes), {_PARTITION: [*virtual.tree(leaves, shape.pod_leaves)]}, default=_PARTITION
        )
        with Cluster.up(spec) as cluster:
            for free in FREE * draws:
                left = _left_over(free, leaves, int(FREE_SHARE * max(sizes)), chance)
                _queue(cluster, sorted(fabric.nodes.difference(left)))
                for size in sizes:
                    job = _queue(cluster, size)
                    yield Allocation(naming, free, fabric, _nodes_of(cluster, job))
                    _cancel(cluster, job)
                _cancel(cluster)


def _left_over(kind: str, leaves: Sequence[Sequence[str]], count: int, chance: random.Random) -> list[str]:
    """The free nodes of a fragmented site: between 1 and all nodes of leaves taken by chance, or nodes everywhere."""
    if kind == "scattered":
        return chance.sample([name for leaf in leaves for name in leaf], count)
    free: list[str] = []
    for leaf in chance.sample(leaves, len(leaves)):
        free += chance.sample(leaf, chance.randint(1, len(leaf)))
        if len(free) >= count:
            return free
    raise ValueError(f"the site has {len(free)} nodes: too few")


def _queue(cluster: Cluster, nodes: int | Sequence[str]) -> int:
    """Queues a job of so many nodes, or of these, and waits until Slurm has given them to it. Returns its number."""
    asked = [f"-N{nodes}"] if isinstance(nodes, int) else [f"-N{len(nodes)}", f"--nodelist={collapse(nodes)}"]
    options = ["--chdir=/tmp", "--output=/dev/null", "--exclusive", f"--partition={_PARTITION}", *asked]
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true", ""])
    job = int(cluster.exec(LOGIN, "sbatch", "--parsable", user="alice", stdin=script.encode()).stdout)
    state = ("squeue", "--noheader", f"--jobs={job}", "--format=%t")
    wait_until(
        lambda: cluster.exec(LOGIN, *state, user="alice").stdout.strip() == "CF", _WAIT_S, f"job {job} has nodes"
    )
    return job


def _nodes_of(cluster: Cluster, job: int) -> tuple[str, ...]:
    found: Mapping[str, list[Mapping[str, str]]] = json.loads(
        cluster.exec(LOGIN, "squeue", "--json", f"--jobs={job}", user="alice").stdout
    )
    return expand(found["jobs"][0]["nodes"])


def _cancel(cluster: Cluster, job: int | None = None) -> None:
    """Cancels one job, or all, and waits until their nodes are free."""
    which = [] if job is None else [f"--jobs={job}"]
    cluster.exec(LOGIN, "scancel", *(["--user=alice"] if job is None else [str(job)]), user="alice")
    left = ("squeue", "--noheader", *which)
    wait_until(lambda: not cluster.exec(LOGIN, *left, user="alice", check=False).stdout.strip(), _WAIT_S, "jobs end")
