"""Fabrics of regular shape. Nodes are called n0, n1, ..."""

from __future__ import annotations

from math import prod

from muster.fabric.model.errors import FabricError
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.node import Nic, Node
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.slurm_topology import flat_fabric
from muster.fabric.sources.tiers import Tiers

MOST_NODES = 1_000_000
"""Nodes of a generated fabric. A larger one is a mistake."""


def fully_connected(nodes: int, tiers: Tiers | None = None) -> Fabric:
    """Every node has the same link to every other one."""
    return flat_fabric(_names(nodes), tiers or Tiers())


def fat_tree(*counts: int, tiers: Tiers | None = None) -> Fabric:
    """A fat tree. `counts` are nodes of a leaf, leaves of a pod, pods of the whole, and so on.

    `fat_tree(4, 3)` is 3 leaves of 4 nodes, `fat_tree(4, 2, 5)` has pods between. `tiers` says whether a tier is
    oversubscribed.
    """
    names = _names(prod(counts) if counts else 0)
    if len(counts) < 2:
        raise FabricError("a fat tree has two tiers at least: nodes of a leaf, leaves of a pod or of the whole")
    return fabric_of(_equal_parts(names, counts), names, tiers or Tiers())


def rail_optimised(nodes_of_pod: int, pods: int, rails: int, tiers: Tiers | None = None) -> Fabric:
    """Pods in which GPU k of each node, with its own adapter, hangs on leaf switch k (rail k) of the pod.

    So all nodes of a pod are one hop apart on each rail: the pod is one leaf domain. A GPU that sends to another rail
    goes through its own node first.
    """
    if not 1 <= rails <= 256:
        raise FabricError(f"{rails} rails: a node has 1 to 256 adapters")
    names = _names(nodes_of_pod * pods)
    nics = tuple(Nic(f"mlx5_{rail}", (rail,)) for rail in range(rails))
    details = [Node(name, gpus=rails, nics=nics) for name in names]
    return fabric_of(_equal_parts(names, (nodes_of_pod, pods)), names, tiers or Tiers(), details)


def torus(*dimensions: int, tiers: Tiers | None = None) -> Fabric:
    """A ring (one dimension), or a torus of two or three. The last dimension varies fastest in the nodes' numbers."""
    names = _names(prod(dimensions) if dimensions else 0)
    name = "torus" if len(dimensions) > 1 else "ring"
    return fabric_of([NodeSet(frozenset(names), name, grid=Grid(dimensions, tuple(names)))], names, tiers or Tiers())


def _names(count: int) -> list[str]:
    if not 1 <= count <= MOST_NODES:
        raise FabricError(f"a fabric of {count} nodes: choose 1 to {MOST_NODES}")
    return [f"n{index}" for index in range(count)]


def _equal_parts(names: list[str], counts: tuple[int, ...]) -> list[NodeSet]:
    """Neighbouring nodes in parts of `counts[0]`, these in parts of `counts[1]`, and so on."""
    sets = []
    for tier in range(1, len(counts) + 1):
        size = prod(counts[:tier])
        word = Level.LEAF.word if tier == 1 else Level.POD.word if tier == 2 else f"tier{tier}-"
        for part in range(len(names) // size):
            sets.append(NodeSet(frozenset(names[part * size : (part + 1) * size]), f"{word}{part}"))
    return sets
