"""Who sits where: group ranks, buddies and neighbours. Pure functions of the members and their leaves.

Seats follow the fabric: nodes of one leaf get adjacent group ranks. Copies and witnesses cross it: a buddy and the
neighbours that watch a node sit in other leaves wherever there are any.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.facts import Seat

NEIGHBOUR_COUNT = 4


@lru_cache(maxsize=65_536)  # every node of a big site, sorted again and again
def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which n2 comes before n10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts)


def _fabric_order(member: Member) -> tuple[object, ...]:
    return (natural_order(member.leaf), natural_order(member.node))


def in_fabric_order(members: Iterable[Member]) -> list[Member]:
    """Members in the order of the fabric: nodes of one leaf together."""
    return sorted(members, key=_fabric_order)


def first_seats(members: Sequence[Member], count: int) -> list[str]:
    """The nodes of the first generation, in group rank order; the rest are spares."""
    return [m.node for m in in_fabric_order(members)[:count]]


def refill_seats(seats: Sequence[str], fit: Sequence[Member], leaves: dict[str, str], fewest: int) -> list[str] | None:
    """The nodes of the next generation: whoever is fit keeps the seat, spares take the empty ones, one of the same leaf
    before others. Where spares do not suffice the last seats move up into the empty ones, so that all others keep their
    ranks, and with them the states in their own memory. None where fewer than `fewest` seats would be left.

    Args:
        seats: nodes of the generation before, in group rank order.
        fit: members that may carry ranks.
        leaves: leaf of every member, the lost ones too.
    """
    names, seated = {m.node for m in fit}, set(seats)
    free = [m for m in in_fabric_order(fit) if m.node not in seated]
    placed = [node if node in names else _take_spare(free, leaves.get(node, "")) for node in seats]
    count = sum(map(bool, placed))
    if count < fewest:
        return None
    moving = [node for node in placed[count:] if node]
    return [node or moving.pop(0) for node in placed[:count]]


def _take_spare(free: list[Member], leaf: str) -> str:
    if not free:
        return ""
    spare = next((m for m in free if m.leaf == leaf), free[0])
    free.remove(spare)
    return spare.node


def _ring(members: Sequence[Member]) -> list[Member]:
    """Members with the leaves interleaved, so that the next in the ring mostly sits elsewhere."""
    depth: dict[str, int] = {}
    keyed = []
    for member in in_fabric_order(members):
        depth[member.leaf] = depth.get(member.leaf, 0) + 1
        keyed.append((depth[member.leaf], natural_order(member.leaf), member))
    return [member for _, _, member in sorted(keyed, key=lambda k: k[:2])]


def _next(ring: Sequence[Member], at: int, count: int) -> list[str]:
    """Up to `count` members after position `at` of the ring, those of other leaves first."""
    others = (ring[(at + step) % len(ring)] for step in range(1, len(ring)))
    return _across(others, ring[at].leaf, count)


def assign_seats(ranked: Sequence[str], members: Sequence[Member]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Seats (in group rank order) and spares of a generation, with their buddies and neighbours.

    Args:
        ranked: nodes that carry ranks, in group rank order.
        members: all that are present, spares too.
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
            neighbours=tuple(_next(whole, at[node], NEIGHBOUR_COUNT)),
        )
        for position, node in enumerate(ranked)
    )
    spares = tuple(
        Seat(m.node, -1, "", tuple(_next(whole, at[m.node], NEIGHBOUR_COUNT)))
        for m in in_fabric_order(members)
        if m.node not in among
    )
    return seats, spares


def witnesses(candidates: Iterable[Member], node: str, leaf: str, count: int) -> list[str]:
    """Up to `count` of `candidates` (in the order of the fabric) to ask after `node`, those of other leaves first."""
    others = (m for m in candidates if m.node != node)
    return _across(others, leaf, count)


def _across(members: Iterable[Member], leaf: str, count: int) -> list[str]:
    """The first `count` members, those of other leaves than `leaf` before those of it."""
    far: list[str] = []
    near: list[str] = []
    for member in members:
        (near if member.leaf == leaf and leaf else far).append(member.node)
        if len(far) == count:
            break
    return (far + near)[:count]
