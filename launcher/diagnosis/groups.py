"""Is each communication group in the tier that the job asked for; where not, what it costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.domain import Domain
from muster.fabric.model.level import Level
from muster.fabric.placement.weights import NO_TRAFFIC
from muster.launcher.diagnosis.links import SlowLink
from muster.launcher.diagnosis.seated_job import SeatedJob


@dataclass(frozen=True, slots=True)
class PlacedKind:
    """All groups of one kind. `loosest`: the tier that joins the widest of them."""

    kind: GroupKind
    count: int
    size: int
    """Ranks of a group."""
    asked: Level
    required: bool
    loosest: Level
    torn: int
    """Groups that are wider than asked."""


@dataclass(frozen=True, slots=True)
class TornGroup:
    """A group that is wider than asked."""

    kind: GroupKind
    number: int
    """Counted from 0 among the groups of its kind."""
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    asked: Level
    found: Level
    switches: tuple[str, ...]
    """What its traffic passes: the switches that its nodes are below, and last the one that joins them."""
    extra_s: float
    """Seconds of communication that one step takes longer than in the asked tier, by prediction."""
    factor: float
    """How many times as long its communication takes."""

    @property
    def name(self) -> str:
        """ "tensor group 3"."""
        return f"{'pipeline pair' if self.kind is GroupKind.PIPELINE else f'{self.kind} group'} {self.number}"


def placed_kinds(seated: SeatedJob) -> list[PlacedKind]:
    """The kinds of groups that have more than one rank."""
    found = []
    for kind in GroupKind:
        groups = seated.groups(kind)
        if not groups or (kind is GroupKind.EXPERT_DATA and seated.axes.expert == 1):
            continue
        asked = seated.asked(kind)
        levels = [seated.level_of(seated.nodes_of(group)) for group in groups]
        torn = sum(level > asked for level in levels)
        required = seated.job.placement.packing(kind).required
        found.append(PlacedKind(kind, len(groups), max(map(len, groups)), asked, required, max(levels), torn))
    return found


def torn_groups(seated: SeatedJob, kinds: Iterable[PlacedKind]) -> list[TornGroup]:
    """The groups that are wider than asked, the most expensive one first."""
    found = [group for kind in kinds if kind.torn for group in _torn(seated, kind)]
    return sorted(found, key=lambda group: -group.extra_s)


def kinds_that_pass(seated: SeatedJob, kinds: Iterable[PlacedKind], slow: SlowLink) -> tuple[GroupKind, ...]:
    """The kinds of groups that wait for a slow link in each step."""
    return tuple(
        kind.kind
        for kind in kinds
        if any(slow.is_passed(*link) for group in seated.groups(kind.kind) for link in seated.ring_of(group))
    )


def _torn(seated: SeatedJob, kind: PlacedKind) -> Iterator[TornGroup]:
    for number, ranks in enumerate(seated.groups(kind.kind)):
        nodes = seated.nodes_of(ranks)
        level = seated.level_of(nodes)
        if level > kind.asked:
            here, there = _seconds(seated, kind, nodes)
            yield TornGroup(
                kind.kind,
                number,
                tuple(ranks),
                nodes,
                kind.asked,
                level,
                _switches(seated, nodes),
                here - there,
                here / there,
            )


def _seconds(seated: SeatedJob, kind: PlacedKind, nodes: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of communication of one step: as the group lies, and within the asked tier."""
    fabric, weight = seated.seats.fabric, seated.weights.get(kind.kind, NO_TRAFFIC)
    ring = [*pairwise(nodes), (nodes[-1], nodes[0])]  # each node once
    here = max(weight.seconds(fabric.loaded_link(one, other)) for one, other in ring)
    domain = fabric.domain(nodes[0], kind.asked)
    there = weight.seconds(domain.link.shared_by(domain.oversubscription))
    return max(here, there), max(there, 1e-12)


def _switches(seated: SeatedJob, nodes: tuple[str, ...]) -> tuple[str, ...]:
    fabric = seated.seats.fabric
    joining = fabric.common(nodes[0], nodes[1])
    for node in nodes[2:]:
        common = fabric.common(nodes[0], node)
        joining = common if len(common.nodes) > len(joining.nodes) else joining
    below = [_below(fabric.path(node), joining) for node in nodes]
    return (*dict.fromkeys(filter(None, below)), joining.label)


def _below(path: tuple[Domain, ...], joining: Domain) -> str:
    """The smallest switch of a node inside of `joining`; empty if it hangs on that itself."""
    inside = [domain for domain in path if domain.nodes < joining.nodes]
    return inside[-1].label if inside else ""
