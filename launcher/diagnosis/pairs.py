"""Which links `muster diagnose --measure` measures, one after another, so that one slow link can be named. Pure.

Each node sends to two others and takes in from two, as far as the time allows: two slow transfers that have one side of
a node in common name it. The nodes that are suspected come first. The first round follows the order of the network, so
that it stays within leaves, and the second one crosses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def links_to_measure(ordered: Sequence[str], suspected: Collection[str]) -> Iterator[tuple[str, str]]:
    """Sender and receiver of each transfer.

    Args:
        ordered: the nodes in the order of the network, nodes of one leaf beside each other.
        suspected: nodes whose links come first.
    """
    links = dict.fromkeys((*_ring(ordered, 1), *_ring(ordered, max(2, len(ordered) // 2))))
    return iter(sorted(links, key=lambda link: not suspected or not {*link} & {*suspected}))


def _ring(nodes: Sequence[str], distance: int) -> Iterator[tuple[str, str]]:
    for at, node in enumerate(nodes):
        other = nodes[(at + distance) % len(nodes)]
        if other != node:
            yield node, other
