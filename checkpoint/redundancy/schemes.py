"""Which scheme of redundancy a job has asked for, and which one an order is about."""

from collections.abc import Mapping, Sequence

from muster.checkpoint.redundancy import copies, parity
from muster.checkpoint.redundancy.scheme import NodePlaces, Protection, Redundancy

MEMORY_NAMES = (copies.MEMORY_NAME, parity.MEMORY_NAME)
"""All names of a `MemoryNeed`."""


def redundancy_of(more_holders: int, group_nodes: int) -> Redundancy:
    """What a job has asked for.

    Args:
        more_holders: nodes that hold whole copies, beside a rank's own node and the first other one.
        group_nodes: the most nodes of a protection group, which holds no whole copies; 0: there are no groups.
    """
    return parity.Parity(group_nodes) if group_nodes else copies.Copies(1 + more_holders)


def places_of(protection: Protection, ranks_on: Mapping[str, Sequence[int]], node: str) -> NodePlaces:
    """What one node sends and keeps in a generation. `ranks_on`: the ranks of each node."""
    places = parity.places if protection.groups else copies.places
    return places(protection, ranks_on, node)


def source_words(combined: bool) -> str:
    """Where a shard comes from that its own node does not hold, for people. `combined`: it is rebuilt."""
    return "parity" if combined else "buddy"
