"""What has changed from one fabric to another, in words: a site re-cables a link, adds a switch, moves a node.

Names do not count. A switch that has a new name and the same nodes has not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.link import Link
from muster.wording import listed


def changes(before: Fabric, after: Fabric) -> tuple[str, ...]:
    """A line for each difference. Empty if both are the same for placement and cost."""
    return () if before == after else (*_nodes(before, after), *_domains(before, after), *_details(before, after))


def _nodes(before: Fabric, after: Fabric) -> Iterator[str]:
    if gone := before.nodes - after.nodes:
        yield f"nodes have left the network: {_some(gone)}"
    if new := after.nodes - before.nodes:
        yield f"nodes have joined the network: {_some(new)}"


def _domains(before: Fabric, after: Fabric) -> Iterator[str]:
    """Domains are compared by their nodes among those that both fabrics have: a node that leaves splits no switch."""
    both = before.nodes & after.nodes
    old, new = _by_nodes(before, both), _by_nodes(after, both)
    for key in sorted(old.keys() - new.keys(), key=sorted):
        yield f"{old[key].level.word} {old[key].label} no longer joins {_some(key)}"
    for key in sorted(new.keys() - old.keys(), key=sorted):
        yield f"{new[key].level.word} {new[key].label} now joins {_some(key)}"
    for key in sorted(old.keys() & new.keys(), key=sorted):
        yield from _one_domain(old[key], new[key])


def _one_domain(old: Domain, new: Domain) -> Iterator[str]:
    if old.level != new.level:
        yield f"{new.label} is now {new.level.word}, and was {old.level.word}"
    for what, was, now in (("its link", old.link, new.link), ("its uplink", old.uplink, new.uplink)):
        if was != now:
            yield f"{new.label}: {what} has {_speed(now)}, and had {_speed(was)}"
    if old.oversubscription != new.oversubscription:
        yield f"{new.label} is oversubscribed {new.oversubscription:g}:1, and was {old.oversubscription:g}:1"
    if old.grid != new.grid and new.grid:
        yield f"nodes of {new.label} have other positions"


def _details(before: Fabric, after: Fabric) -> Iterator[str]:
    for name in sorted(before.nodes & after.nodes):
        old, new = before.node(name), after.node(name)
        if old.uplink != new.uplink:
            yield f"{name}: its link has {_speed(new.uplink)}, and had {_speed(old.uplink)}"
        elif old != new:
            yield f"{name}: its GPUs, adapters, rack or power feed have changed"


def _by_nodes(fabric: Fabric, both: frozenset[str]) -> dict[frozenset[str], Domain]:
    """The domains by their nodes. Of two with the same nodes, the inner one counts: it has the faster link."""
    return {shared: domain for domain in fabric.root.walk() if (shared := domain.nodes & both)}


def _speed(link: Link | None) -> str:
    return "the speed of its tier" if link is None else f"{link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} µs"


def _some(names: Iterable[str]) -> str:
    return listed(sorted(names), ", ")
