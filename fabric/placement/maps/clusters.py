"""Seats in clusters: groups inside groups, so that what is packed together can be taken as one piece.

With an order of kinds, for example tensor before pipeline, the groups of the first kind are the innermost clusters.
Those that a group of the next kind connects become one cluster, and so on, until one cluster has all seats. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.placement.node_groups import NodeGroup


@dataclass(frozen=True, slots=True)
class Cluster:
    """One seat, or clusters that are packed together if possible."""

    seats: tuple[int, ...]
    """All seats in it, in the order in which they are packed."""
    parts: tuple[Cluster, ...] = ()
    """Empty for a single seat."""


def nested(groups: Sequence[NodeGroup], seats: int, order: Sequence[GroupKind]) -> Cluster:
    """The cluster of all `seats`; the groups of the first kind of `order` are innermost."""
    clusters = [Cluster((seat,)) for seat in range(seats)]
    for kind in order:
        clusters = list(_joined(clusters, [group for group in groups if group.kind is kind], seats))
    return clusters[0] if len(clusters) == 1 else _around(clusters)


def _joined(clusters: Sequence[Cluster], groups: Sequence[NodeGroup], seats: int) -> Iterator[Cluster]:
    """The clusters, those joined that a group connects."""
    of_seat = [0] * seats
    for number, cluster in enumerate(clusters):
        for seat in cluster.seats:
            of_seat[seat] = number
    above = list(range(len(clusters)))

    def top(number: int) -> int:
        while above[number] != number:
            above[number] = above[above[number]]
            number = above[number]
        return number

    for group in groups:
        first = top(of_seat[group.seats[0]])
        for seat in group.seats[1:]:
            above[top(of_seat[seat])] = first
            first = top(first)
    together: dict[int, list[Cluster]] = {}
    for number, cluster in enumerate(clusters):
        together.setdefault(top(number), []).append(cluster)
    for parts in together.values():
        yield parts[0] if len(parts) == 1 else _around(parts)


def _around(parts: Sequence[Cluster]) -> Cluster:
    return Cluster(tuple(seat for part in parts for seat in part.seats), tuple(parts))
