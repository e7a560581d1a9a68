"""Groups of ranks as groups of nodes: the ranks of one node are placed together, so only traffic between nodes counts.

A seat is the place of a node in a generation, numbered by group rank: if a node has L ranks, seat s carries the ranks
s * L to s * L + L − 1. Groups with the same seats become one group. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, Groups, pipeline_pairs, rank_groups
from muster.fabric.model.level import Level
from muster.fabric.placement.weights import NO_TRAFFIC, Weights

_NO_LEVELS: Mapping[GroupKind, Level] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Seats that communicate."""

    kind: GroupKind
    seats: tuple[int, ...]
    """Two or more, each once, in the order of the ring."""
    messages: float
    """Messages of one group of ranks over each link of its ring in one step."""
    size: float
    """Bytes, likewise."""
    count: int = 1
    """Groups of ranks that have these seats. They work at the same time, each with links of its own."""
    within: Level = Level.ANY
    """The job requires that all seats are in one domain of this level."""
    preferred: Level = Level.ANY
    """The job prefers that all seats are in one domain of this level."""

    def links(self) -> Iterator[tuple[int, int]]:
        """The neighbours in the ring. Two seats have one link."""
        yield from pairwise(self.seats)
        if len(self.seats) > 2:
            yield self.seats[-1], self.seats[0]


def node_groups(
    axes: Axes,
    local_ranks: int,
    weights: Weights,
    *,
    virtual_stages: int = 1,
    required: Mapping[GroupKind, Level] = _NO_LEVELS,
    preferred: Mapping[GroupKind, Level] = _NO_LEVELS,
) -> tuple[NodeGroup, ...]:
    """The groups that communicate between nodes.

    Args:
        axes: degrees and order. The world size is a multiple of `local_ranks`.
        local_ranks: ranks of each node.
        weights: what one group of each kind sends. A kind that is missing sends nothing, and does not matter.
        virtual_stages: of the pipeline.
        required: levels in which groups must be packed.
        preferred: levels in which groups are packed if that is possible.
    """
    found = []
    for kind in GroupKind:
        weight, within = weights.get(kind, NO_TRAFFIC), required.get(kind, Level.ANY)
        prefers = preferred.get(kind, Level.ANY)
        if weight == NO_TRAFFIC and within is Level.ANY:
            continue
        groups = (
            pipeline_pairs(axes, virtual_stages=virtual_stages)
            if kind is GroupKind.PIPELINE
            else rank_groups(axes, kind)
        )
        for seats, count in _seats_of(groups, local_ranks).items():
            found.append(NodeGroup(kind, seats, weight.messages, weight.size, count, within, prefers))
    return tuple(found)


def without_preferences(groups: Iterable[NodeGroup]) -> tuple[NodeGroup, ...]:
    """The same groups. Their costs are predicted seconds, whatever the job prefers and requires."""
    return tuple(replace(group, within=Level.ANY, preferred=Level.ANY) for group in groups)


def _seats_of(groups: Groups, local_ranks: int) -> Mapping[tuple[int, ...], int]:
    """The seats of groups that span several nodes, and how many groups of ranks have them."""
    seats: Counter[tuple[int, ...]] = Counter()
    for group in groups:
        if group[0] // local_ranks != group[-1] // local_ranks:
            seats[tuple(dict.fromkeys(rank // local_ranks for rank in group))] += 1
    return seats
