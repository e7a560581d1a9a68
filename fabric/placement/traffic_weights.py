"""Weights from a job's own traffic, as `fabric/estimate` lists it. Pure.

Only what a step waits for counts in full. Traffic that the GPU hides behind other work counts a tenth: it may still
delay the step where it lasts longer than that work.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from muster.fabric.cost.choice import Collective
from muster.fabric.estimate.traffic import Hidden, Traffic
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.placement.weights import NO_TRAFFIC, Weight, Weights, ring_all_reduce, ring_pass, send

HIDDEN_SHARE = 0.1


def weights_of(traffic: Iterable[Traffic]) -> Weights:
    """The weight of each kind of group."""
    found: dict[GroupKind, Weight] = {}
    for one in traffic:
        share = 1.0 if one.hidden is Hidden.NOTHING else HIDDEN_SHARE
        found[one.group] = found.get(one.group, NO_TRAFFIC) + _weight(one, share * one.times)
    return MappingProxyType(found)


def _weight(one: Traffic, calls: float) -> Weight:
    match one.kind:
        case Collective.ALL_REDUCE:
            return ring_all_reduce(one.ranks, one.size, calls)
        case Collective.SEND:
            return send(one.size, calls)
        case _:
            return ring_pass(one.ranks, one.size, calls)
