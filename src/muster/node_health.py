"""The health of a node: which there are, what holds for each, and what may follow it. Pure.

Every room may import this module, because coordinator, node daemon and launcher read the same names. `HEALTHS` is the
literal table of the nodes' state machine. All that a health decides by itself follows from its row there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class NodeHealth(StrEnum):
    """The health of a node. Users and the wire call it the verdict on the node."""

    FIT = "FIT"
    SUSPECT = "SUSPECT"  # silent or accused, being probed; shown to users, never journaled, because it proves nothing
    DEGRADED = "DEGRADED"  # works on; a sign of a coming failure was seen
    UNFIT = "UNFIT"  # alive, and out of service: a fatal fault, ranks that failed there, or a precursor
    HUNG = "HUNG"  # its kernel answers, its processes do not
    LOST = "LOST"  # nothing answers: power, kernel or network
    RETURNING = "RETURNING"  # was LOST or HUNG, and answers again; drained until it is resumed


@dataclass(frozen=True, slots=True)
class HealthRow:
    """What holds for a node of one health.

    `may_become`: the healths that may follow. `in_service`: the node may carry ranks. `unresponsive`: it sends nothing,
    though its streams may stay open on this side for a while; Slurm is told that it is DOWN, and not to drain it.
    `resumable`: it is FIT again once Slurm has it in service: an operator has resumed it, or Muster has.
    """

    may_become: frozenset[NodeHealth]
    in_service: bool = False
    unresponsive: bool = False
    resumable: bool = False


_FIT, _DEGRADED, _UNFIT = NodeHealth.FIT, NodeHealth.DEGRADED, NodeHealth.UNFIT
_HUNG, _LOST, _RETURNING = NodeHealth.HUNG, NodeHealth.LOST, NodeHealth.RETURNING

HEALTHS: dict[NodeHealth, HealthRow] = {
    _FIT: HealthRow(frozenset({_DEGRADED, _UNFIT, _HUNG, _LOST}), in_service=True),
    NodeHealth.SUSPECT: HealthRow(frozenset(), in_service=True),
    _DEGRADED: HealthRow(frozenset({_FIT, _UNFIT, _HUNG, _LOST}), in_service=True),
    _UNFIT: HealthRow(frozenset({_FIT, _HUNG, _LOST}), resumable=True),
    _HUNG: HealthRow(frozenset({_RETURNING}), unresponsive=True),
    _LOST: HealthRow(frozenset({_RETURNING}), unresponsive=True),
    _RETURNING: HealthRow(frozenset({_FIT}), resumable=True),
}


def _healths(holds: Callable[[HealthRow], bool]) -> frozenset[NodeHealth]:
    return frozenset(health for health, row in HEALTHS.items() if holds(row))


NODE_TRANSITIONS = {health: row.may_become for health, row in HEALTHS.items()}
OUT_OF_SERVICE = _healths(lambda row: not row.in_service)
UNRESPONSIVE = _healths(lambda row: row.unresponsive)
RESUMABLE = _healths(lambda row: row.resumable)
