"""What each kind of group sends in a step, in the form that placement uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from muster.fabric.cost.choice import Collective
from muster.fabric.estimate.traffic import Traffic
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.placement.weights import NO_TRAFFIC, Weight, Weights, ring_all_reduce, ring_pass, send


def placement_weights(traffic: Iterable[Traffic]) -> Weights:
    """The weights of a model's groups: all collectives of one kind of group together. What hides them is left out.

    Placement compares rings: an all-to-all counts as one, as it does there.
    """
    found: dict[GroupKind, Weight] = {}
    for one in traffic:
        found[one.group] = found.get(one.group, NO_TRAFFIC) + _weight(one)
    return found


def _weight(traffic: Traffic) -> Weight:
    match traffic.kind:
        case Collective.ALL_REDUCE:
            return ring_all_reduce(traffic.ranks, traffic.size, traffic.times)
        case Collective.SEND:
            return send(traffic.size, traffic.times)
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return ring_pass(traffic.ranks, traffic.size, traffic.times)
