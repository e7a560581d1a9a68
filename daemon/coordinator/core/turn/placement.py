"""Which node carries which group rank, and what its buddy or parity group and its watched peers are. Pure functions.

Seats follow the network fabric. If the ranks form groups that communicate more than others, the seats are those of the
least predicted communication (`muster.fabric.placement`). Otherwise ranks count along the tree of switches. Copies and
witnesses cross the fabric: a buddy, and the peers that watch a node, share as few failure domains with it as possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from muster.daemon.coordinator.core.state.facts import Seat
from muster.daemon.coordinator.core.turn.communication import failure_domains_of, least_communication
from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.failure_domains import FailureDomains
from muster.fabric.placement.maps.refill import MovePrice, refill
from muster.fabric.placement.maps.spares import spread_spares
from muster.fabric.placement.node_groups import NodeGroup

WATCHED_PEER_COUNT = 4
"""Number of peers that each node watches. Two of them are witnesses; the others may fail."""

Groups = tuple[tuple[str, ...], ...]

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
) -> list[str]:
    """The nodes of the first generation, in the order of group ranks. The other nodes are spares.

    Args:
        fabric: has all of `nodes`.
        nodes: those that may carry ranks.
        count: number of seats.
        last_choices, groups: as for `refill_seats`.
        apart: what spares shall not share (`GangSpec.spread_spares`).
    """
    if groups and len(nodes) >= count:
        last = frozenset((node, number) for node, number in last_choices.items() if node in nodes)
        seats = least_communication(fabric, groups, frozenset(nodes), count, last)
    else:
        seats = tuple(sorted(in_fabric_order(fabric, nodes), key=lambda node: last_choices.get(node, 0))[:count])
    if apart:
        spares = in_fabric_order(fabric, set(nodes).difference(seats))
        seats = spread_spares(fabric, groups, seats, spares, failure_domains_of(fabric, apart), last_choices)
    return list(seats) if groups else in_fabric_order(fabric, seats)


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
    apart_from_buddy: tuple[str, ...] | None = None,
    more_copies: int = 0,
    *,
    with_buddies: bool = True,
) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Seats (in the order of group ranks) and spares of a generation, with buddies and watched peers.

    Args:
        fabric: has all of `nodes`.
        ranked: nodes that carry ranks, in the order of group ranks.
        nodes: all present members, spares too.
        apart_from_buddy: what a node and its buddy shall not share (`GangSpec.spread_replicas`); None: anything.
        more_copies: how many nodes beside the buddy hold replicas, as far as there are so many.
        with_buddies: False if nodes hold parities instead (`parity_groups`).
    """
    apart, copies = failure_domains_of(fabric), failure_domains_of(fabric, apart_from_buddy)
    whole, carriers = apart.ring(nodes), copies.ring(ranked)
    at = {node: position for position, node in enumerate(whole)}
    among = {node: position for position, node in enumerate(carriers)}

    def watched(node: str) -> tuple[str, ...]:
        return tuple(apart.next_apart(whole, at[node], WATCHED_PEER_COUNT))

    def seat(position: int, node: str) -> Seat:
        buddies = copies.next_apart(carriers, among[node], 1 + more_copies) or [""]
        buddy, *more = buddies if with_buddies else [""]
        return Seat(node, position, buddy, watched(node), tuple(more))

    seats = tuple(seat(position, node) for position, node in enumerate(ranked))
    spares = tuple(Seat(node, -1, "", watched(node)) for node in in_fabric_order(fabric, nodes) if node not in among)
    return seats, spares


def parity_groups(
    fabric: Fabric,
    ranked: Sequence[str],
    most: int,
    apart_from_each_other: tuple[str, ...] | None = None,
    before: Sequence[tuple[str, str]] = (),
    groups_before: Groups = (),
) -> Groups:
    """Groups of nodes that hold the parity of their states together: of `most` nodes at most, and equally large as far
    as possible. A node that would be alone is added to another group.

    Args:
        fabric: has all nodes.
        ranked: nodes that carry ranks, in the order of group ranks.
        most: nodes of a group, 2 or more.
        apart_from_each_other: what nodes of a group shall not share (`GangSpec.spread_replicas`).
        before: for each seat, its node in the generation before, and now. Empty: the number of seats has changed.
        groups_before: the groups of that generation. They stay, with new nodes in the place of lost ones, unless other
            groups share less: what they hold stays of use.
    """
    count = max(1, min(-(-len(ranked) // most), len(ranked) // 2))
    if len(ranked) < 2:
        return ()
    domains = failure_domains_of(fabric, apart_from_each_other)
    # Nodes of one domain follow each other, in domains of all sizes, and are dealt out to the groups in turn. So each
    # group gets as few of them as possible.
    first: dict[object, int] = {}
    for position, node in enumerate(in_fabric_order(fabric, ranked)):
        for kind, domain in enumerate(domains.of[node]):
            first.setdefault((kind, domain), position)
    kinds = sorted(range(len(domains.kinds)), key=lambda kind: not domains.required[kind])
    dealt = sorted(
        ranked, key=lambda node: (*(first[kind, domains.of[node][kind]] for kind in kinds), fabric.order[node])
    )
    groups = tuple(tuple(dealt[number::count]) for number in range(count))
    now = dict(before)
    if not now or {node for group in groups_before for node in group} != now.keys():
        return groups
    kept = tuple(tuple(now[node] for node in group) for group in groups_before)
    return groups if _shared_within(domains, groups) < _shared_within(domains, kept) else kept


def _shared_within(domains: FailureDomains, groups: Groups) -> int:
    """How many failure domains the pairs of nodes within groups share."""
    return sum(domains.shared(one, other) for group in groups for one, other in combinations(group, 2))


def witnesses(fabric: Fabric, candidates: Iterable[str], node: str, count: int) -> list[str]:
    """Up to `count` of `candidates` (along the tree) to probe `node`, those first that share least with it."""
    return failure_domains_of(fabric).most_apart(node, (other for other in candidates if other != node), count)
