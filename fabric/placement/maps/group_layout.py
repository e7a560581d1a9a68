"""What follows from groups alone, whatever nodes their seats have: links, kinds, shares. Pure.

A gang keeps its groups, and each placement and each swap asks for the same ones. So the newest layouts are kept, by the
identity of the groups: to compare thousands of groups takes longer than to use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from muster.fabric.placement.node_groups import NodeGroup

MEAN_SHARE = 1.0
"""Of the mean of all groups of a kind, beside their slowest one."""

Touching = tuple[int, int, int, int]
"""Group, link in the group, and the two seats of the link."""


class GroupLayout:
    """The layout of groups. It is never changed."""

    def __init__(self, groups: Sequence[NodeGroup], seats: int) -> None:
        """`seats`: all seats of `groups` are less."""
        self.pairs: list[list[tuple[int, int]]] = [list(group.links()) for group in groups]
        """The seats of each link of each group."""
        self.touching: list[list[Touching]] = [[] for _ in range(seats)]
        """The links of each seat."""
        for number, pairs in enumerate(self.pairs):
            for at, (one, other) in enumerate(pairs):
                link = (number, at, one, other)
                self.touching[one].append(link)
                self.touching[other].append(link)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(group.kind for group in groups))}
        self.kind = [kinds[group.kind] for group in groups]
        """The kind of each group, as a number."""
        self.of_kind: list[list[int]] = [[] for _ in kinds]
        """The groups of each kind."""
        for number, kind in enumerate(self.kind):
            self.of_kind[kind].append(number)
        totals = [sum(groups[number].count for number in members) for members in self.of_kind]
        self.share = [MEAN_SHARE * group.count / totals[kind] for group, kind in zip(groups, self.kind, strict=True)]
        """The part of each group in the mean of its kind."""


def layout_of(groups: Sequence[NodeGroup], seats: int) -> GroupLayout:
    """The layout of groups of `seats` seats. Only that of a tuple is kept: a list may change."""
    return _kept(_Same(groups), seats) if isinstance(groups, tuple) else GroupLayout(groups, seats)


class _Same:
    """Groups that are equal to themselves only."""

    def __init__(self, groups: tuple[NodeGroup, ...]) -> None:
        self.groups = groups

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.groups is other.groups

    def __hash__(self) -> int:
        return id(self.groups)


@lru_cache(maxsize=16)
def _kept(same: _Same, seats: int) -> GroupLayout:
    return GroupLayout(same.groups, seats)
