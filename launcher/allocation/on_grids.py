"""Requests on tori and rings: numbers of nodes that Slurm has places for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from muster.launcher.allocation.clusters import PackedPieces
from muster.launcher.allocation.plan import NodeRequest, Request, RequestOptions, added_spares
from muster.launcher.errors import WrongInput

_SIZES_SHOWN = 12


def torus_sizes(wanted: NodeRequest) -> list[int]:
    """The numbers of nodes of all shapes that jobs may have."""
    return sorted({prod(shape) for unit in wanted.topology.units for shape in unit.shapes})


def plan_on_torus(wanted: NodeRequest, clusters: Sequence[PackedPieces]) -> RequestOptions:
    """The next number of nodes that the torus takes.

    Raises:
        WrongInput: there is none; or the job is of another number, and has no groups for which spares would be added.
    """
    sizes = torus_sizes(wanted)
    total = next((size for size in sizes if size >= wanted.total), 0)
    known = ", ".join(map(str, sizes[:_SIZES_SHOWN])) or "none"
    if len(sizes) > _SIZES_SHOWN:
        known += f", ..., {sizes[-1]}"
    added = total - wanted.total
    if not total or (added and not clusters):
        near = f"spares = {total - wanted.nodes}" if total else f"nodes + spares = {sizes[-1]} at most" if sizes else ""
        raise WrongInput(
            f"nodes + spares = {wanted.total}: the torus takes jobs of these numbers of nodes: {known}",
            f"choose {near}. Nothing was queued" if near else "Nothing was queued",
        )
    notes = [f"the torus takes jobs of these numbers of nodes: {known}"]
    if added:
        notes.append(added_spares(added, str(wanted.total), "no such number"))
    return RequestOptions(Request(wanted.spares + added, f"a shape of {total} nodes"), notes=tuple(notes))


def plan_on_rings(wanted: NodeRequest) -> RequestOptions:
    """Consecutive nodes. Raises WrongInput if the job is larger than the largest ring."""
    largest = max((len(unit.nodes) for unit in wanted.topology.units), default=0)
    if 0 < largest < wanted.total:
        raise WrongInput(
            f"nodes + spares = {wanted.total}: a job is in one ring, and the largest ring has {largest} nodes",
            f"choose nodes + spares = {largest} or less. Nothing was queued",
        )
    return RequestOptions(
        Request(wanted.spares, "consecutive nodes of one ring"), notes=("a ring gives consecutive nodes",)
    )
