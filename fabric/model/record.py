"""A fabric as a record of few bytes, for a journal. Nodes are numbered in natural order, so those of a domain are
mostly one run of numbers: 1,000 nodes on 40 leaves take less than 30 kB.

Journals hold these fields under their names. A field that is added has a default. None is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from muster.fabric.model.domain import Domain
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.grid import Grid
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node, natural_order

Runs = tuple[tuple[int, int], ...]
"""Numbers of nodes, as runs: the first number, and how many follow each other."""


@dataclass(frozen=True, slots=True)
class DomainRecord:
    """One domain of the tree."""

    level: str
    nodes: Runs
    link: Link
    around: int = -1
    """The position of the record of the domain around this one; -1 for the root, which is the first record."""
    oversubscription: float = 1.0
    uplink: Link | None = None
    name: str = ""
    dimensions: tuple[int, ...] = ()
    """Of a ring or torus."""
    positions: tuple[int, ...] = ()
    """Of a ring or torus: the position of each node in `nodes`, in that order."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is known of nodes that are alike. `details` has no name."""

    details: Node
    nodes: Runs


@dataclass(frozen=True)
class FabricRecord:
    """A fabric. `fabric` is the whole, made when it is first asked for."""

    nodes: tuple[str, ...] = ()
    """All nodes, in natural order."""
    domains: tuple[DomainRecord, ...] = ()
    details: tuple[NodeRecord, ...] = ()

    @cached_property
    def fabric(self) -> Fabric:
        """The fabric of which this is the record.

        Raises:
            FabricError: the record is none of a fabric.
        """
        inside: dict[int, list[int]] = {}
        for number, domain in enumerate(self.domains):
            inside.setdefault(domain.around, []).append(number)

        def made(number: int) -> Domain:
            record = self.domains[number]
            names = self._names(record.nodes)
            children = tuple(map(made, inside.get(number, ())))
            level = Level.of(record.level)
            grid = _grid(record, names) if record.dimensions else None
            return Domain(level, frozenset(names), record.link, children, record.oversubscription, record.uplink, grid,
                          name=record.name)  # fmt: skip

        details = {name: replace(one.details, name=name) for one in self.details for name in self._names(one.nodes)}
        return Fabric(made(0), tuple(details[name] for name in self.nodes if name in details))

    def _names(self, runs: Runs) -> list[str]:
        return [name for first, count in runs for name in self.nodes[first : first + count]]


def record_of(fabric: Fabric) -> FabricRecord:
    """The record of `fabric`. Of fabrics that are equal and have equal names, the records are equal."""
    nodes = tuple(sorted(fabric.nodes, key=natural_order))
    number_of = {node: number for number, node in enumerate(nodes)}
    domains: list[DomainRecord] = []

    def note(domain: Domain, around: int) -> None:
        numbers = sorted(number_of[node] for node in domain.nodes)
        dimensions: tuple[int, ...] = ()
        positions: tuple[int, ...] = ()
        if domain.grid is not None:
            at = {name: position for position, name in enumerate(domain.grid.places) if name}
            dimensions, positions = domain.grid.dimensions, tuple(at[nodes[number]] for number in numbers)
        here = len(domains)
        domains.append(
            DomainRecord(domain.level.word, _runs(numbers), domain.link, around, domain.oversubscription,
                         domain.uplink, domain.name, dimensions, positions)
        )  # fmt: skip
        for child in domain.children:
            note(child, here)

    note(fabric.root, -1)
    return FabricRecord(nodes, tuple(domains), tuple(_details(fabric, number_of)))


def _details(fabric: Fabric, number_of: Mapping[str, int]) -> Iterable[NodeRecord]:
    alike: dict[Node, list[int]] = {}
    for node in fabric.details:
        alike.setdefault(replace(node, name=""), []).append(number_of[node.name])
    for details, numbers in sorted(alike.items(), key=lambda one: min(one[1])):
        if details != Node(""):
            yield NodeRecord(details, _runs(sorted(numbers)))


def _runs(numbers: Iterable[int]) -> Runs:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return tuple(found)


def _grid(record: DomainRecord, names: list[str]) -> Grid:
    at = dict(zip(record.positions, names, strict=True))
    size = 1
    for dimension in record.dimensions:
        size *= dimension
    return Grid(record.dimensions, tuple(at.get(position, "") for position in range(size)))
