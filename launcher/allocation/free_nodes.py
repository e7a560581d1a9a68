"""Which nodes a job could have now, in words: what a user wants to know of a request that has to wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, Unit
from muster.launcher.allocation.on_trees import leaf_switches
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Node

_FREE = frozenset({NodeState.IDLE, NodeState.PLANNED, NodeState.CLOUD, NodeState.POWERED_DOWN})
"""A node with no other state can run a job at once, or as soon as it has booted. PLANNED: Slurm keeps it for a job that
starts later, and others may run there until then."""
_SHOWN = 8
"""Leaves or blocks that one line names."""


def in_words(topology: SlurmTopology, nodes: Collection[Node], partition: str | None) -> str:
    """The free nodes by leaf switch, block, ring or torus: "free now: 8 of 16 nodes: 5 in s0, 3 in s1".

    Args:
        nodes: all nodes that Slurm has.
        partition: the job's; None: the default one, of which nothing is known here. Then all nodes count.
    """
    usable = [node for node in nodes if not partition or partition in node.partitions]
    free = {node.name for node in usable if NodeState.IDLE in node.states and node.states <= _FREE}
    words = f"free now: {len(free)} of {len(usable)} nodes"
    counts = [(len(free.intersection(unit.nodes)), unit.name) for unit in _smallest(topology)]
    some = sorted((one for one in counts if one[0]), key=lambda one: -one[0])
    if len(counts) < 2 or not some:
        return words
    more = f", and less in {len(some) - _SHOWN} more" if len(some) > _SHOWN else ""
    return f"{words}: {', '.join(f'{count} in {name}' for count, name in some[:_SHOWN])}{more}"


def _smallest(topology: SlurmTopology) -> Sequence[Unit]:
    if topology.kind is Kind.TREE:
        return sorted(leaf_switches(topology.units), key=lambda unit: topology.units.index(unit))
    return [unit for unit in topology.units if not unit.aggregated]
