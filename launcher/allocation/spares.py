"""Whether a spare is near the groups that may lose a node. Pure arithmetic on numbers of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from muster.launcher.allocation.clusters import NodeCluster


def after_a_loss(nodes: int, spares: int, cluster: NodeCluster, sizes: Sequence[int], where: str) -> str:
    """What the loss of a node may do to the groups of `cluster`, in words. Empty: a spare can be near each of them, or
    there are none.

    A leaf or block that holds pieces needs a spare of its own, and room for it.

    Args:
        nodes: nodes that carry ranks.
        spares: more nodes. Slurm decides where they are: this is the best case.
        cluster: pieces of so many nodes, each within one leaf or block.
        sizes: the nodes of each leaf or block.
        where: "leaf switch" or "block".
    """
    if not spares or cluster.nodes < 2:
        return ""
    pieces = -(-nodes // cluster.nodes)
    beside_spare = sorted(((size - 1) // cluster.nodes for size in sizes), reverse=True)
    near = list(accumulate(beside_spare))
    covered = min(pieces, near[min(spares, len(near)) - 1] if near else 0)
    if covered == pieces:
        return ""
    needed = next((count for count, total in enumerate(near, start=1) if total >= pieces), 0)
    would = f"spares = {needed} could" if needed else f"no number of spares can, because a {where} has too little room"
    have = f"{spares} spare{'s' * (spares != 1)} can be near {covered} of {pieces} pieces of {cluster.nodes} nodes"
    return f"after the loss of a node, {cluster.kind} groups may lie in two {_plural(where)}: {have}; {would}"


def _plural(where: str) -> str:
    return where + ("es" if where.endswith("h") else "s")
