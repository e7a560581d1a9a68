"""Whether a spare is near the groups that may lose a node. Pure arithmetic on numbers of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from muster.launcher.allocation.clusters import PackedPieces
from muster.wording import counted


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a network: how many there are, and the nodes of each."""

    count: int
    size: int


def on_leaves(nodes: int, spares: int, cluster: PackedPieces, sizes: Sequence[int]) -> str:
    """What the loss of a node may do to the groups of `cluster` on a tree, in words. Empty: a spare can be near each of
    them, or there are none.

    A leaf that holds pieces needs a spare of its own, and room for it. Slurm decides where the spares are: this is the
    best case.

    Args:
        nodes: nodes that carry ranks.
        spares: more nodes.
        cluster: pieces of so many nodes, each within one leaf.
        sizes: the nodes of each leaf.
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
    would = "no number of spares can, because a leaf switch has too little room"
    if needed:
        how = "if Slurm gives each leaf switch one of them: on a tree, it decides that itself"
        would = f"spares = {needed} could, {how}"
    have = f"{counted(spares, 'spare')} can be near {covered} of {counted(pieces, 'piece')} of {cluster.nodes} nodes"
    return f"after the loss of a node, {cluster.kind} groups may lie in two leaf switches: {have}; {would}"


def in_segments(nodes: int, spares: int, cluster: PackedPieces, segment: int, blocks: Blocks) -> str:
    """The same on blocks. Slurm keeps a segment in one block: a piece whose segment has room for a spare has one near.

    Args:
        segment: nodes of each segment. It divides `nodes + spares`.
    """
    if not spares or cluster.nodes < 2:
        return ""
    pieces = -(-nodes // cluster.nodes)
    segments = (nodes + spares) // segment
    covered = min(pieces, segments * ((segment - 1) // cluster.nodes))
    if covered == pieces:
        return ""
    needed = _spares_of_segments(nodes, cluster.nodes, pieces, blocks)
    would = f"spares = {needed} are enough" if needed else "in these blocks, no number of spares is enough"
    have = f"spares are sure to be near {covered} of {counted(pieces, 'piece')} of {cluster.nodes} nodes"
    return f"after the loss of a node, {cluster.kind} groups may lie in two blocks: {have}; {would}"


def _spares_of_segments(nodes: int, piece: int, pieces: int, blocks: Blocks) -> int:
    """The fewest spares with which each piece has a segment with room for a spare. 0: none."""
    most = min(pieces * (piece + 1), blocks.count * blocks.size)
    for total in range(nodes + 1, most + 1):
        for size in range(piece + 1, blocks.size + 1):
            count, rest = divmod(total, size)
            if not rest and count * ((size - 1) // piece) >= pieces and count <= blocks.count * (blocks.size // size):
                return total - nodes
    return 0
