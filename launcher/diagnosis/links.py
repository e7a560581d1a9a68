"""Which links are measured, and which are slow: the sending or receiving side of a node, or one link. Pure.

Transfers of one sort over the same tier are compared with each other. Copies of shards take the way of training, and
requested transfers have the link for themselves: these two are never compared. A rating comes from the interfaces of
both nodes, or from the speed of tiers that the site has given. It counts only up to what one transfer reaches.

Measured on request (`muster diagnose --measure`): each node sends to two others and takes in from two, as far as the
time allows. Two slow transfers that have one side of a node in common name it. The nodes that are suspected come first.
The first round follows the order of the network, so that it stays within leaves, and the second one crosses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.fabric.model.level import Level
from muster.v1.diagnosis_pb2 import LinkRate

SLOW_SHARE, BUSY_SLOW_SHARE = 0.5, 0.15
"""The shares of the usual rate below which a transfer is slow: where its cores were its own, and where other processes
wanted them, so that the rates of like links differ three times. As in `muster check`."""
USUAL = 0.75
"""The quantile of all rates of one sort that is their usual rate."""
FEWEST_COMPARED = 3
"""Rates of one sort over one tier that say what is usual there. With fewer, all tiers are compared together."""
REACHED_COPY, REACHED_REQUESTED = 0.4e9, 1.5e9
"""Bytes a second that a copy of a shard, and a requested transfer, reach on a link that is faster, on one slow core.
A rating above that can't be checked with them."""

LevelBetween = Callable[[str, str], Level]
RatingOf = Callable[[str, str], float | None]
"""Bytes a second between two nodes; None if nobody has given it."""


class Side(StrEnum):
    """Which part of the way is slow."""

    SENDS = "sends"
    RECEIVES = "receives"
    BOTH = "both ways"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One transfer, judged."""

    sender: str
    receiver: str
    level: Level
    rate: float
    """Bytes a second."""
    usual: float
    """What such transfers usually reach, or what the link is rated for if that is less; 0: nothing to compare with."""
    requested: bool
    ago_s: float
    slow_share: float = SLOW_SHARE
    rated: float = 0.0
    """What the interfaces, or the site's file, say that it carries, in bytes a second; 0: not known."""

    @property
    def slow(self) -> bool:
        """Whether it is far below that."""
        return self.rate < self.slow_share * self.usual


@dataclass(frozen=True, slots=True)
class SlowLink:
    """What slow transfers have in common: the link of one node, or one link between two nodes."""

    nodes: tuple[str, ...]
    """One node; of a link between two nodes, the sender and the receiver."""
    side: Side
    rate: float
    """Of the slowest transfer, in bytes a second."""
    usual: float
    transfers: int
    """How many slow transfers show it."""
    level: Level
    """The tier of a link between two nodes; NODE for the link of one node."""

    def is_passed(self, sender: str, receiver: str) -> bool:
        """Whether traffic from one node to another passes it."""
        match self.side:
            case Side.SENDS:
                return sender in self.nodes
            case Side.RECEIVES:
                return receiver in self.nodes
            case Side.BOTH:
                return sender in self.nodes or receiver in self.nodes
            case Side.BETWEEN:
                return (sender, receiver) == self.nodes


def judged(rates: Iterable[LinkRate], level_between: LevelBetween, rating_of: RatingOf) -> list[MeasuredLink]:
    """The transfers, each with what is usual for it."""
    every = [
        (one, level_between(one.from_node, one.to_node), one.bytes / one.seconds) for one in rates if one.seconds > 0
    ]
    # Copies are made while ranks compute.
    busy = {one.requested for one, _, _ in every if one.cores_shared} | {False}
    found = []
    for one, level, rate in every:
        same = [(other_level, other) for of, other_level, other in every if of.requested == one.requested]
        alike = [other for other_level, other in same if other_level is level]
        compared = alike if len(alike) >= FEWEST_COMPARED else [other for _, other in same]
        usual = _quantile(compared) if len(compared) >= FEWEST_COMPARED else 0.0
        ratings = [found for found in (rating_of(one.from_node, one.to_node), one.rated) if found]
        rating = min(ratings, default=0.0)
        if rating:
            usual = max(usual, min(rating, REACHED_REQUESTED if one.requested else REACHED_COPY))
        share = BUSY_SLOW_SHARE if one.requested in busy else SLOW_SHARE
        found.append(
            MeasuredLink(one.from_node, one.to_node, level, rate, usual, one.requested, one.ago_s, share, rating)
        )
    return found


def _quantile(rates: Sequence[float]) -> float:
    return sorted(rates)[math.ceil(USUAL * len(rates)) - 1]


def slow_links(links: Collection[MeasuredLink]) -> list[SlowLink]:
    """What is slow, the slowest first. The side of a node is named if all its transfers are slow, and two at least."""
    found: list[tuple[Side, str]] = []
    while accused := list(_accused(links, found)):
        found.append(max(accused)[1:])
    named = [_of_node(links, node, {side for side, of in found if of == node}) for node in {node for _, node in found}]
    open_links = [link for link in links if link.slow and not _explained(link, found)]
    pairs = [_between(both) for both in _by_pair(open_links)]
    return sorted((*named, *pairs), key=lambda slow: (slow.rate / slow.usual, slow.nodes))


def _by_pair(links: Iterable[MeasuredLink]) -> Iterable[list[MeasuredLink]]:
    """The links between each two nodes together: bytes one way slow the acknowledgements of the other way."""
    pairs: dict[frozenset[str], list[MeasuredLink]] = {}
    for link in links:
        pairs.setdefault(frozenset((link.sender, link.receiver)), []).append(link)
    return pairs.values()


def _between(links: Collection[MeasuredLink]) -> SlowLink:
    slowest = min(links, key=lambda link: link.rate / link.usual)
    nodes = (slowest.sender, slowest.receiver)
    return SlowLink(nodes, Side.BETWEEN, slowest.rate, slowest.usual, len(links), slowest.level)


def _accused(links: Collection[MeasuredLink], found: list[tuple[Side, str]]) -> Iterator[tuple[int, Side, str]]:
    """The sides of nodes whose transfers are all slow, with how many slow ones each explains that nothing else does."""
    for side in (Side.SENDS, Side.RECEIVES):
        for node in sorted({_end(link, side) for link in links}):
            own = [link for link in links if _end(link, side) == node]
            left = [link for link in own if not _explained(link, found)]
            if len(own) >= 2 and len(left) >= 2 and all(link.slow for link in own):
                yield len(left), side, node


def _end(link: MeasuredLink, side: Side) -> str:
    return link.sender if side is Side.SENDS else link.receiver


def _explained(link: MeasuredLink, found: list[tuple[Side, str]]) -> bool:
    return (Side.SENDS, link.sender) in found or (Side.RECEIVES, link.receiver) in found


def _of_node(links: Iterable[MeasuredLink], node: str, sides: set[Side]) -> SlowLink:
    side = Side.BOTH if len(sides) > 1 else next(iter(sides))
    own = [link for link in links if any(_end(link, one) == node for one in sides)]
    slowest = min(own, key=lambda link: link.rate)
    return SlowLink((node,), side, slowest.rate, slowest.usual, len(own), Level.NODE)


def links_to_measure(ordered: Sequence[str], suspected: Collection[str]) -> Iterator[tuple[str, str]]:
    """Sender and receiver of each transfer that is measured on request, one after another.

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
