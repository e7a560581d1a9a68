"""Failure domains of nodes: the power feed, the rack and the leaf switch. Nodes in the same domain may fail together.

Buddies, witnesses and spares are chosen so that they share few domains. An unknown domain counts as not shared. The
search uses a ring of nodes. Neighbours in the ring are mostly in different domains, so a few steps along it suffice,
even for 10,000 nodes. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from operator import eq, mul

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain

SPREAD = (FailureDomain.POWER, FailureDomain.RACK, FailureDomain.LEAF)
"""What copies and witnesses are spread over, the largest first."""
REQUIRED = 10
"""The weight of a required kind. Each other kind has weight 1, so a required kind counts more than all others."""
MOST_STEPS = 256
"""How many steps along the ring are searched for one node. More steps would help only if the domains have very
different sizes."""

Domains = tuple[object, ...]
"""The domains of one node, one for each kind. For an unknown domain, the node gets a domain of its own."""


def spread_over(words: Iterable[str]) -> tuple[tuple[FailureDomain, ...], frozenset[FailureDomain]]:
    """The failure domains that `words` name, and those of them that are required: "power", "require rack".

    Raises:
        ValueError: a word names none.
    """
    kinds, required = [], []
    for word in words:
        *must, name = word.split(" ")
        if must not in ([], ["require"]):
            raise ValueError(f"{word!r} names no failure domain")
        kinds.append(FailureDomain(name))
        required += kinds[-1:] if must else []
    return tuple(kinds), frozenset(required)


class FailureDomains:
    """The failure domains of the nodes of a fabric, of those kinds that tell nodes apart."""

    def __init__(
        self,
        fabric: Fabric,
        kinds: Sequence[FailureDomain] = SPREAD,
        required: Collection[FailureDomain] = (),
    ) -> None:
        """`required`: those of `kinds` that nodes must not share. One of them counts more than all others."""
        self.fabric = fabric
        self.kinds = tuple(kinds)
        self.required = tuple(kind in required for kind in self.kinds)
        self._weighted = any(self.required)
        self._weights = tuple(REQUIRED if must else 1 for must in self.required)

    @cached_property
    def of(self) -> Mapping[str, Domains]:
        """The domains of each node, by kind as in `kinds`."""
        found = [self._domains(kind) for kind in self.kinds]
        return {node: tuple([of_kind.get(node) or (node,) for of_kind in found]) for node in self.fabric.nodes}

    @cached_property
    def any_shared(self) -> bool:
        """Two nodes of the fabric share a domain."""
        return any(len(set(of_kind)) < len(self.of) for of_kind in zip(*self.of.values(), strict=True))

    def _domains(self, kind: FailureDomain) -> dict[str, object]:
        """The domain of each node that has one which is known."""
        if kind is FailureDomain.RACK:
            return {node.name: node.rack for node in self.fabric.details if node.rack}
        if kind is FailureDomain.POWER:
            return {node.name: node.power_feed for node in self.fabric.details if node.power_feed}
        return {node: at for at, leaf in enumerate(self.fabric.domains(Level.LEAF), 1) for node in leaf.nodes}

    def shared(self, one: str, other: str) -> int:
        """How many failure domains both nodes are in. A required one counts REQUIRED times."""
        equal = map(eq, self.of[one], self.of[other])
        return sum(map(mul, self._weights, equal)) if self._weighted else sum(equal)

    def count(self, nodes: Iterable[str]) -> tuple[Counter[object], ...]:
        """How many of `nodes` are in each domain, by kind. For `shared_with`."""
        found = tuple(Counter[object]() for _ in self.kinds)
        for node in nodes:
            for counter, domain in zip(found, self.of[node], strict=True):
                counter[domain] += 1
        return found

    def shared_with(self, node: str, counted: Sequence[Counter[object]]) -> int:
        """What `node` shares with all nodes that were counted: the sum of `shared`."""
        numbers = (counter[domain] for counter, domain in zip(counted, self.of[node], strict=True))
        return sum(map(mul, self._weights, numbers))

    def breaks_requirement(self, one: str, other: str) -> bool:
        """Both nodes are in a failure domain that they must not share."""
        if not any(self.required):
            return False
        return any(must and a == b for must, a, b in zip(self.required, self.of[one], self.of[other], strict=True))

    def ring(self, nodes: Iterable[str]) -> list[str]:
        """The nodes, interleaved: the next one in the ring is mostly in other domains."""
        order = self.fabric.order
        return _interleaved(sorted(nodes, key=order.__getitem__), self.of, 0, len(self.kinds))

    def next_apart(self, ring: Sequence[str], at: int, count: int) -> list[str]:
        """Up to `count` nodes after position `at` of the ring: those that share least with the node there, and of equal
        ones the nearest in the ring.
        """
        steps = min(len(ring), MOST_STEPS + 1)
        return self.most_apart(ring[at], (ring[(at + step) % len(ring)] for step in range(1, steps)), count)

    def most_apart(self, node: str, others: Iterable[str], count: int) -> list[str]:
        """The `count` of `others` that share least with `node`; of equal ones the first."""
        unshared: list[str] = []
        sharing: list[tuple[int, int, str]] = []
        for number, other in enumerate(others):
            if len(unshared) == count:
                return unshared
            if shared := self.shared(node, other):
                sharing.append((shared, number, other))
            else:
                unshared.append(other)
        return [*unshared, *(other for _, _, other in sorted(sharing))][:count]


def _interleaved(nodes: list[str], of: Mapping[str, Domains], kind: int, kinds: int) -> list[str]:
    """One node of each domain of the largest kind in turn; within such a domain, one of each smaller domain in turn."""
    if kind == kinds or len(nodes) < 3:
        return nodes
    parts: dict[object, list[str]] = {}
    for node in nodes:
        domain = of[node][kind]
        parts.setdefault(None if isinstance(domain, tuple) else domain, []).append(node)  # all unknown ones together
    inner = [_interleaved(part, of, kind + 1, kinds) for part in parts.values()]
    if len(inner) == 1:
        return inner[0]
    longest = max(map(len, inner))
    return [part[at] for at in range(longest) for part in inner if at < len(part)]
