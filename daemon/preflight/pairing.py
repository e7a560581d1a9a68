"""Which nodes form pairs, and what the rates of the pairs say: the one slow node, or the one slow link. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROUNDS = 3
"""Rounds of pairs. Each node is measured with three others, however many nodes there are."""
SLOW_SHARE = 0.5
"""The share of the usual rate below which a pair is slow. Pairs on one leaf switch and across the fabric differ by less
on a network without oversubscription."""
SHARED_CORES_SLOW_SHARE = 0.15
"""The same where processes of others wanted the cores meanwhile: the rates of like pairs then differ three times."""
_USUAL = 0.75
"""The quantile of all rates that is the usual rate. One slow node of three makes two of three pairs slow."""


@dataclass(frozen=True, slots=True)
class PairRate:
    """What one pair reached. `gb_s`: 0 if it did not come to an end, and `error` says why. `cores_shared`: other
    processes wanted the same cores meanwhile."""

    first: str
    second: str
    gb_s: float
    error: str = ""
    cores_shared: bool = False


def rounds(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs of each round, as numbers of nodes, the lower one first. With an odd number of nodes, one pauses."""
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    for _ in range(min(ROUNDS, len(places) - 1)):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]  # the first one stays, the others move on


@dataclass(frozen=True, slots=True)
class SlowParts:
    """The nodes that are slow in all of their pairs, and the slow pairs of other nodes."""

    nodes: tuple[str, ...]
    links: tuple[PairRate, ...]


def localise(rates: Sequence[PairRate]) -> SlowParts:
    """Which nodes and links are slow. A node needs two slow pairs, and no other."""
    slow = _slow_pairs(rates)
    of_node: dict[str, list[PairRate]] = {}
    for rate in rates:
        for node in (rate.first, rate.second):
            of_node.setdefault(node, []).append(rate)
    # The node with the most slow pairs explains them; what it explains accuses nobody else.
    found: list[str] = []
    while True:
        open_pairs = [rate for rate in slow if rate.first not in found and rate.second not in found]
        accused = [
            node
            for node, pairs in of_node.items()
            if sum(pair in open_pairs for pair in pairs) >= 2 and all(pair in slow for pair in pairs)
        ]
        if not accused:
            return SlowParts(tuple(found), tuple(open_pairs))
        found.append(max(accused, key=lambda node: (sum(pair in open_pairs for pair in of_node[node]), node)))


def _slow_pairs(rates: Sequence[PairRate]) -> list[PairRate]:
    if not rates:
        return []
    ordered = sorted(rate.gb_s for rate in rates)
    usual = ordered[math.ceil(_USUAL * len(ordered)) - 1]
    share = SHARED_CORES_SLOW_SHARE if any(rate.cores_shared for rate in rates) else SLOW_SHARE
    return [rate for rate in rates if rate.gb_s <= 0 or rate.gb_s < share * usual]
