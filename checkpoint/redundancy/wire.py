"""Who holds what, as messages say it: the only place that knows the names which they had first."""

from collections.abc import Iterable

from muster.checkpoint.redundancy.parity import parts_with
from muster.checkpoint.redundancy.scheme import NodePlaces, Place, Protection
from muster.checkpoint.redundancy.schemes import places_of
from muster.v1.agent_pb2 import TIER_PARITY, Order, RestoreSource
from muster.v1.common_pb2 import ParityGroup
from muster.v1.peer_pb2 import ParityPart, ShardOffer


def places_of_order(order: Order, node: str) -> NodePlaces:
    """What a node sends and keeps in the generation of an order."""
    holders = {
        member.node: tuple(dict.fromkeys(name for name in (member.buddy, *member.more_buddies) if name))
        for member in order.members
    }
    ranks_on: dict[str, list[int]] = {}
    for seat in order.places:
        ranks_on.setdefault(seat.node, []).append(seat.rank)
    return places_of(Protection(holders, tuple(tuple(group.nodes) for group in order.parity_groups)), ranks_on, node)


def group_messages(groups: Iterable[Iterable[str]]) -> Iterable[ParityGroup]:
    """The protection groups of an order, or of a view."""
    return (ParityGroup(nodes=group) for group in groups)


def part_message(place: Place) -> ParityPart:
    """Which part a place is. It does not name the version."""
    return ParityPart(ranks=place.ranks, part=place.part)


def address_offer(offer: ShardOffer, place: Place) -> None:
    """Say what the receiver of an offer does with the shard."""
    if place.ranks:
        offer.parity.CopyFrom(part_message(place))


def is_combined(source: RestoreSource) -> bool:
    """Whether a source holds a part, and not the shard."""
    return source.tier == TIER_PARITY


def combined_ranks(source: RestoreSource) -> tuple[int, ...]:
    """The ranks whose shards a source combines; empty: it holds the shard."""
    return tuple(source.parity_ranks)


def mark_combined(source: RestoreSource, ranks: tuple[int, ...], place: int) -> None:
    """Make it the source that holds a part of `ranks`: the one at `place` among those that have its rank's shard."""
    source.tier = TIER_PARITY
    source.parity_ranks.extend(ranks)
    source.parity_part = parts_with(source.rank, ranks)[place]
