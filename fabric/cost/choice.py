"""Which algorithm a collective uses: the cheapest for the size of the message, as NCCL chooses. Pure.

NCCL computes a time for each algorithm from tables of latencies and bandwidths and takes the smallest
(`ncclTopoTuneModel` in its src/graph/tuning.cc). So does `cheapest`, with the formulas of `collectives` and
`hierarchy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.fabric.cost import hierarchy
from muster.fabric.cost.hierarchy import Tier


class Collective(StrEnum):
    """What a group does together."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


class Algorithm(StrEnum):
    """How it is done."""

    NOTHING = "nothing"
    RING = "ring"
    TREE = "tree"
    LEADERS = "ring of leaders"
    SHARDS = "sharded rings"
    SWITCH = "in-network"
    PAIRS = "pairwise"


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """An algorithm and its time in seconds."""

    algorithm: Algorithm
    seconds: float


def cheapest(kind: Collective, tiers: Sequence[Tier], size: float, *, in_network: bool = False) -> AlgorithmChoice:
    """The cheapest algorithm for `size` bytes. `in_network`: the switches of every tier of the group can reduce.

    Raises:
        ValueError: the size is negative or not a finite number.
    """
    if not 0 <= size < float("inf"):
        raise ValueError(f"a message has 0 or more bytes, not {size:g}")
    joined = hierarchy.without_empty(tiers)
    if not joined:
        return AlgorithmChoice(Algorithm.NOTHING, 0.0)
    return min(_choices(kind, joined, size, in_network), key=lambda choice: choice.seconds)


def _choices(kind: Collective, tiers: Sequence[Tier], size: float, in_network: bool) -> list[AlgorithmChoice]:
    match kind:
        case Collective.ALL_REDUCE:
            found = [
                AlgorithmChoice(Algorithm.RING, hierarchy.flat_ring_all_reduce(tiers, size)),
                AlgorithmChoice(Algorithm.TREE, hierarchy.tree_all_reduce(tiers, size)),
                AlgorithmChoice(Algorithm.LEADERS, hierarchy.leaders_all_reduce(tiers, size)),
                AlgorithmChoice(Algorithm.SHARDS, hierarchy.sharded_all_reduce(tiers, size)),
            ]
            return (
                [*found, AlgorithmChoice(Algorithm.SWITCH, hierarchy.switch_all_reduce(tiers, size))]
                if in_network
                else found
            )
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER:
            return [
                AlgorithmChoice(Algorithm.RING, hierarchy.flat_ring_pass(tiers, size)),
                AlgorithmChoice(Algorithm.SHARDS, hierarchy.sharded_pass(tiers, size)),
            ]
        case Collective.ALL_TO_ALL:
            return [AlgorithmChoice(Algorithm.PAIRS, hierarchy.all_to_all(tiers, size))]
        case Collective.SEND:
            # One of many pairs that send at the same time: each has the rails of one rank.
            return [AlgorithmChoice(Algorithm.PAIRS, hierarchy.slowest(tiers).time(size))]
