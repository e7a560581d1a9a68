"""Which node carries which group rank, and what its buddy and its watched peers are. Pure functions.

Seats follow the network fabric. If the ranks form groups that communicate more than others, the seats are those of the
least predicted communication (`muster.fabric.placement`). Otherwise nodes of one leaf switch get adjacent group ranks.
Copies and witnesses cross the fabric: a buddy, and the peers that watch a node, sit on other leaves if there are any.
"""

from collections.abc import Iterable, Mapping, Sequence

from muster.daemon.coordinator.core.state.communication import fabric_of_members, least_communication
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.facts import Seat
from muster.fabric.model.natural_order import natural_order
from muster.fabric.placement.node_groups import NodeGroup
from muster.fabric.placement.refill import refill

WATCHED_PEER_COUNT = 4
"""Number of peers that each node watches. Two of them are witnesses; the others may fail."""

_NONE: Mapping[str, int] = {}


def _fabric_order(member: Member) -> tuple[object, ...]:
    return (natural_order(member.leaf), natural_order(member.node))


def in_fabric_order(members: Iterable[Member]) -> list[Member]:
    """Members with the nodes of one leaf together."""
    return sorted(members, key=_fabric_order)


def first_seats(
    members: Sequence[Member],
    count: int,
    last_choices: Mapping[str, int] = _NONE,
    groups: tuple[NodeGroup, ...] = (),
) -> list[str]:
    """The nodes of the first generation, in the order of group ranks. The other members are spares. `last_choices` and
    `groups`: as for `refill_seats`."""
    if groups and len(members) >= count:
        nodes = frozenset(member.node for member in members)
        last = frozenset((node, number) for node, number in last_choices.items() if node in nodes)
        return list(least_communication(fabric_of_members(members), groups, nodes, count, last))
    chosen = sorted(in_fabric_order(members), key=lambda member: last_choices.get(member.node, 0))[:count]
    return [member.node for member in in_fabric_order(chosen)]


def refill_seats(
    seats: Sequence[str],
    usable: Sequence[Member],
    members: Sequence[Member],
    fewest: int,
    last_choices: Mapping[str, int] = _NONE,
    groups: tuple[NodeGroup, ...] = (),
) -> list[str] | None:
    """The nodes of the next generation; None if fewer than `fewest` seats would be filled.

    A usable node keeps its seat. Spares take the empty seats: those that cost the least communication or, without
    groups, spares of the same leaf first. If spares do not suffice, the nodes of the last seats move up into the empty
    seats. So all others keep their ranks, and with them the state in their own memory.

    Args:
        seats: nodes of the generation before, in the order of group ranks.
        usable: members that may carry ranks.
        members: every member, lost ones too.
        fewest: the fewest seats to start with.
        last_choices: nodes that take a seat only if no other spare is left, those with a higher number last.
        groups: seats that communicate (`communication.communicating_seats`).
    """
    names, seated, leaves = {m.node for m in usable}, set(seats), {m.node: m.leaf for m in members}
    free = [m for m in in_fabric_order(usable) if m.node not in seated]
    if groups and seated <= leaves.keys() and len(free) >= sum(node not in names for node in seats):
        return list(refill(fabric_of_members(members), groups, seats, names, last_choices=last_choices).seats)
    placed = [node if node in names else _take_spare(free, leaves.get(node, ""), last_choices) for node in seats]
    count = sum(map(bool, placed))
    if count < fewest:
        return None
    moving = [node for node in placed[count:] if node]
    return [node or moving.pop(0) for node in placed[:count]]


def _take_spare(free: list[Member], leaf: str, last_choices: Mapping[str, int]) -> str:
    if not free:
        return ""
    spare = min(free, key=lambda member: (last_choices.get(member.node, 0), member.leaf != leaf))
    free.remove(spare)
    return spare.node


def _ring(members: Sequence[Member]) -> list[Member]:
    """Members with the leaves interleaved: the next member in the ring is mostly on another leaf."""
    depth: dict[str, int] = {}
    keyed = []
    for member in in_fabric_order(members):
        depth[member.leaf] = depth.get(member.leaf, 0) + 1
        keyed.append((depth[member.leaf], natural_order(member.leaf), member))
    return [member for _, _, member in sorted(keyed, key=lambda k: k[:2])]


def _next(ring: Sequence[Member], at: int, count: int) -> list[str]:
    """Up to `count` members after position `at` of the ring, members of other leaves first."""
    others = (ring[(at + step) % len(ring)] for step in range(1, len(ring)))
    return _across(others, ring[at].leaf, count)


def assign_seats(ranked: Sequence[str], members: Sequence[Member]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Seats (in the order of group ranks) and spares of a generation, with buddies and watched peers.

    Args:
        ranked: nodes that carry ranks, in the order of group ranks.
        members: all present members, spares too.
    """
    by_node = {m.node: m for m in members}
    whole, carriers = _ring(members), _ring([by_node[n] for n in ranked])
    at = {m.node: position for position, m in enumerate(whole)}
    among = {m.node: position for position, m in enumerate(carriers)}
    seats = tuple(
        Seat(
            node=node,
            group_rank=position,
            buddy=next(iter(_next(carriers, among[node], 1)), ""),
            watched_peers=tuple(_next(whole, at[node], WATCHED_PEER_COUNT)),
        )
        for position, node in enumerate(ranked)
    )
    spares = tuple(
        Seat(m.node, -1, "", tuple(_next(whole, at[m.node], WATCHED_PEER_COUNT)))
        for m in in_fabric_order(members)
        if m.node not in among
    )
    return seats, spares


def witnesses(candidates: Iterable[Member], node: str, leaf: str, count: int) -> list[str]:
    """Up to `count` of `candidates` (in fabric order) to probe `node`, those of other leaves first."""
    others = (m for m in candidates if m.node != node)
    return _across(others, leaf, count)


def _across(members: Iterable[Member], leaf: str, count: int) -> list[str]:
    """The first `count` members, members of other leaves than `leaf` first."""
    far: list[str] = []
    near: list[str] = []
    for member in members:
        (near if member.leaf == leaf and leaf else far).append(member.node)
        if len(far) == count:
            break
    return (far + near)[:count]
