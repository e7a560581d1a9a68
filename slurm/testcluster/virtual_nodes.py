"""Virtual nodes r0, r1, ... of a test cluster: Slurm allocates them, and nothing runs on them.

They are nodes of a cloud that is never powered up. So one controller hands out the nodes of a large site as its
topology plugin does. A job that gets them stays CONFIGURING until it is cancelled. They are in partitions of their own,
one for each topology. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muster.slurm.client.parsing.hostlist import collapse
from muster.slurm.testcluster.spec import ClusterSpec

CPUS = 8
Lines = Iterator[str]


def names(count: int) -> list[str]:
    """The names of virtual nodes."""
    return [f"r{at}" for at in range(count)]


def cluster_of(count: int, topologies: Mapping[str, Sequence[str]], default: str = "") -> ClusterSpec:
    """A cluster with a real node n0, and `count` virtual nodes in a partition for each topology.

    Args:
        count: virtual nodes.
        default: the topology of the whole cluster. Empty: a flat one.
        topologies: by the name of topology and partition, what `tree`, `blocks` or `rings` gives.
    """
    nodes = f"r[0-{count - 1}]"
    text = [] if default else ["- topology: default", "  cluster_default: true", "  flat: true"]
    for name, lines in topologies.items():
        text += [f"- topology: {name}", f"  cluster_default: {str(name == default).lower()}", *lines]
    extra = (
        "ResumeProgram=/bin/true",
        "SuspendProgram=/bin/true",
        "SuspendTime=INFINITE",
        "SuspendTimeout=1",
        "ResumeTimeout=60000",
        "ResumeRate=0",
        "TreeWidth=65533",
        f"NodeName={nodes} CPUs={CPUS} RealMemory=1000 State=CLOUD",
        *(f"PartitionName={name} Nodes={nodes} MaxTime=INFINITE State=UP Topology={name}" for name in topologies),
    )
    return ClusterSpec(
        nodes=1, leaves=1, topology="flat", daemons=False, extra=extra, topology_yaml="\n".join(text) + "\n"
    )


def tree(leaves: Sequence[Sequence[str]], leaves_of_pod: int = 0) -> Lines:
    """Leaf switches leaf0, ..., below pods pod0, ... if they are given, below one spine."""
    yield "  tree:"
    yield "    switches:"
    for at, nodes in enumerate(leaves):
        yield from _switch(f"leaf{at}", "nodes", nodes)
    tops = [f"leaf{at}" for at in range(len(leaves))]
    if leaves_of_pod:
        groups = [tops[at : at + leaves_of_pod] for at in range(0, len(tops), leaves_of_pod)]
        tops = [f"pod{at}" for at in range(len(groups))]
        for pod, group in zip(tops, groups, strict=True):
            yield from _switch(pod, "children", group)
    yield from _switch("spine", "children", tops)


def blocks(groups: Sequence[Sequence[str]], sizes: Sequence[int]) -> Lines:
    """Blocks b0, ... and aggregated blocks. `sizes`: their numbers of nodes, the smallest first."""
    yield "  block:"
    yield "    block_sizes:"
    yield from (f"    - {size}" for size in sizes)
    yield "    blocks:"
    for at, nodes in enumerate(groups):
        yield f"    - block: b{at}"
        yield f"      nodes: {collapse(nodes)}"


def rings(groups: Sequence[Sequence[str]]) -> Lines:
    """Rings g0, ... of 16 nodes at most."""
    yield "  ring:"
    yield "    rings:"
    for at, nodes in enumerate(groups):
        yield f"    - ring: g{at}"
        yield f"      nodes: {collapse(nodes)}"


def _switch(name: str, key: str, below: Sequence[str]) -> Lines:
    yield f"    - switch: {name}"
    yield f"      {key}: {collapse(below)}"
