"""Which node carries which group rank, and who holds its shards and what its watched peers are. Pure functions.

Seats follow the network fabric. If the ranks form groups that communicate more than others, the seats are those of the
least predicted communication (`muster.fabric.placement`). Otherwise ranks count along the tree of switches. Copies and
witnesses cross the fabric: the nodes that hold a node's shards, and the
peers that watch it, share as few failure domains with it as possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from muster.checkpoint.redundancy.scheme import Protection
from muster.daemon.coordinator.core.state.facts import Seat
from muster.daemon.coordinator.core.turn.communication import failure_domains_of, least_communication
from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.maps.refill import MovePrice, refill
from muster.fabric.placement.maps.spares import spread_spares
from muster.fabric.placement.node_groups import NodeGroup

WATCHED_PEER_COUNT = 4
"""Number of peers that each node watches. Two of them are witnesses; the others may fail."""

_NONE: Mapping[str, int] = {}


def in_fabric_order(fabric: Fabric, nodes: Iterable[str]) -> list[str]:
    """The nodes along the tree of the fabric."""
    return sorted(nodes, key=fabric.order.__getitem__)


def first_seats(
    fabric: Fabric,
    nodes: Collection[str],
    count: int,
    last_choices: Mapping[str, int] = _NONE,
    groups: tuple[NodeGroup, ...] = (),
    apart: tuple[str, ...] = (),
    own: Sequence[str] = (),
) -> list[str]:
    """The nodes of the first generation, in the order of group ranks. The other nodes are spares.

    Args:
        fabric: has all of `nodes`.
        nodes: those that may carry ranks.
        count: number of seats.
        last_choices, groups: as for `refill_seats`.
        apart: what spares shall not share (`GangSpec.spread_spares`).
        own: nodes that have these seats, if they may carry ranks (`GangSpec.own_nodes`), whatever groups would gain.
    """
    if own:
        return _own_seats(fabric, nodes, own[:count], last_choices)
    if groups and len(nodes) >= count:
        last = frozenset((node, number) for node, number in last_choices.items() if node in nodes)
        seats = least_communication(fabric, groups, frozenset(nodes), count, last)
    else:
        seats = tuple(sorted(in_fabric_order(fabric, nodes), key=lambda node: last_choices.get(node, 0))[:count])
    if apart:
        spares = in_fabric_order(fabric, set(nodes).difference(seats))
        seats = spread_spares(fabric, groups, seats, spares, failure_domains_of(fabric, apart), last_choices)
    return list(seats) if groups else in_fabric_order(fabric, seats)


def _own_seats(
    fabric: Fabric, nodes: Collection[str], own: Sequence[str], last_choices: Mapping[str, int]
) -> list[str]:
    """`own`, with other nodes in the seats of those that may carry no ranks, or only if no other node is left."""
    fit = [node for node in nodes if not last_choices.get(node)]
    usable = frozenset(fit if len(fit) >= len(own) else nodes)
    others = sorted(in_fabric_order(fabric, usable.difference(own)), key=lambda node: last_choices.get(node, 0))
    seats = [node if node in usable else (others.pop(0) if others else "") for node in own]
    return [node for node in seats if node]


def refill_seats(
    fabric: Fabric,
    seats: Sequence[str],
    usable: Collection[str],
    fewest: int,
    last_choices: Mapping[str, int] = _NONE,
    groups: tuple[NodeGroup, ...] = (),
    price: MovePrice | None = None,
) -> list[str] | None:
    """The nodes of the next generation; None if fewer than `fewest` seats would be filled.

    A usable node keeps its seat, but for second moves that pay. Spares take the empty seats: those that cost the least
    communication or, without groups, the nearest spares first. If spares do not suffice, the nodes of the last seats
    move up into the empty seats. So all others keep their ranks, and with them the state in their own memory.

    Args:
        fabric: has all usable and all seated nodes.
        seats: nodes of the generation before, in the order of group ranks.
        usable: nodes that may carry ranks.
        fewest: the fewest seats to start with.
        last_choices: nodes that take a seat only if no other spare is left, those with a higher number last.
        groups: seats that communicate (`communication.communicating_seats`).
        price: what the move of one more node costs; None: none is moved.
    """
    present = frozenset(usable)
    free = in_fabric_order(fabric, present.difference(seats))
    if groups and len(free) >= sum(node not in present for node in seats):
        return list(refill(fabric, groups, seats, present, price, last_choices).seats)
    placed = [node if node in present else _take_spare(free, fabric, node, last_choices) for node in seats]
    count = sum(map(bool, placed))
    if count < fewest:
        return None
    moving = [node for node in placed[count:] if node]
    return [node or moving.pop(0) for node in placed[:count]]


def _take_spare(free: list[str], fabric: Fabric, lost: str, last_choices: Mapping[str, int]) -> str:
    """The spare for the seat of the node `lost`; empty if none is left."""
    if not free:
        return ""
    spare = min(free, key=lambda node: (last_choices.get(node, 0), fabric.level_between(node, lost)))
    free.remove(spare)
    return spare


def assign_seats(
    fabric: Fabric,
    ranked: Sequence[str],
    nodes: Collection[str],
    protection: Protection,
) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Seats (in the order of group ranks) and spares of a generation, with holders and watched peers.

    Args:
        fabric: has all of `nodes`.
        ranked: nodes that carry ranks, in the order of group ranks.
        nodes: all present members, spares too.
        protection: who holds the shards of `ranked` (`GangSpec.redundancy`).
    """
    apart, carriers = failure_domains_of(fabric), frozenset(ranked)
    whole = apart.ring(nodes)
    at = {node: position for position, node in enumerate(whole)}

    def watched(node: str) -> tuple[str, ...]:
        return tuple(apart.next_apart(whole, at[node], WATCHED_PEER_COUNT))

    def seat(position: int, node: str) -> Seat:
        holder, *more = protection.holders.get(node) or [""]
        return Seat(node, position, holder, watched(node), tuple(more))

    seats = tuple(seat(position, node) for position, node in enumerate(ranked))
    spares = tuple(Seat(node, -1, "", watched(node)) for node in in_fabric_order(fabric, nodes) if node not in carriers)
    return seats, spares


def witnesses(fabric: Fabric, candidates: Iterable[str], node: str, count: int) -> list[str]:
    """Up to `count` of `candidates` (along the tree) to probe `node`, those first that share least with it."""
    return failure_domains_of(fabric).most_apart(node, (other for other in candidates if other != node), count)
