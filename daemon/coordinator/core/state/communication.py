"""What a placement must know of a gang: which seats communicate, the part of the fabric that its members are on, and
whether groups lie as near together as the job asks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.fabric.groups.axes import MEGATRON_ORDER, Axes, parse_order
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.errors import FabricError
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.rank_map import place
from muster.fabric.placement.weights import Weight, usual_weights
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers

LastChoices = frozenset[tuple[str, int]]
"""Nodes that get a seat only if there are too few others; those with a higher number last."""

_PLURAL = {Level.LEAF: "leaves", Level.POD: "pods"}


def axes_of(spec: GangSpec) -> Axes:
    """The axes of parallelism of a gang with all its nodes.

    Raises:
        ValueError: the degrees don't fit the number of ranks, or each other. The message says why.
    """
    world, model = spec.nodes * spec.ranks_per_node, spec.tensor * spec.context * spec.pipeline
    if world % model:
        raise ValueError(f"tensor * context * pipeline = {model} must divide nodes * ranks_per_node = {world}")
    order = parse_order(spec.axis_order) if spec.axis_order else MEGATRON_ORDER
    return Axes(spec.tensor, spec.context, spec.expert, world // model, spec.pipeline, order)


@lru_cache(maxsize=32)  # each start of a generation asks, and a gang keeps its spec
def communicating_seats(spec: GangSpec) -> tuple[NodeGroup, ...]:
    """The groups of seats that communicate in each step. Empty if the ranks are replicas and nothing else.

    Replicas make one ring, which any order along the tree of switches serves as well.
    """
    axes = axes_of(spec)
    if axes.data == axes.world_size and axes.expert == 1:
        return ()
    weights = {GroupKind(one.kind): Weight(one.messages, one.size) for one in spec.traffic} or usual_weights(axes)
    return node_groups(
        axes,
        spec.ranks_per_node,
        weights,
        required=_levels(spec, required=True),
        preferred=_levels(spec, required=False),
    )


def _levels(spec: GangSpec, *, required: bool) -> Mapping[GroupKind, Level]:
    found = {GroupKind(one.kind): Level.of(one.packed_in) for one in spec.traffic if one.required is required}
    return {kind: level for kind, level in found.items() if level is not Level.ANY}


def fabric_of_members(members: Iterable[Member]) -> Fabric:
    """The fabric as far as the switches of these members tell it."""
    return _fabric(tuple(sorted((member.node, member.leaf, *member.switches_above) for member in members)))


@lru_cache(maxsize=16)  # the members of a gang change seldom, and a large fabric takes 50 ms
def _fabric(places: tuple[tuple[str, ...], ...]) -> Fabric:
    """`places`: each node with its switches, the leaf first.

    Members attach at different times. If the site has renamed or re-cabled switches meanwhile, theirs may be no tree.
    Then the leaves alone count: each node names one.
    """
    try:
        return _tree(places)
    except FabricError:
        return _tree(tuple(place[:2] for place in places))


def _tree(places: tuple[tuple[str, ...], ...]) -> Fabric:
    below: dict[str, set[str]] = {}
    for node, *switches in places:
        for switch in filter(None, switches):
            below.setdefault(switch, set()).add(node)
    sets = [NodeSet(frozenset(nodes), switch) for switch, nodes in below.items()]
    return fabric_of(sets, [node for node, *_ in places], Tiers())


@lru_cache(maxsize=64)  # a start that waits asks again with each event
def least_communication(
    fabric: Fabric, groups: tuple[NodeGroup, ...], nodes: frozenset[str], seats: int, last_choices: LastChoices
) -> tuple[str, ...]:
    """The node of each seat, by group rank. Arguments as for `rank_map.place`."""
    return place(fabric, groups, nodes, seats, dict(last_choices)).seats


def wider_than_asked(spec: GangSpec, ranked: Sequence[str], members: Mapping[str, Member]) -> str:
    """In words, which groups lie in more leaves or pods than the job asks: "tensor groups of 4 nodes: 1 of 4 spans 2
    leaves". Empty if none does, or if Slurm has no switches.

    Args:
        ranked: the node of each seat. A gang with fewer nodes than its spec has no groups but those of data.
        members: the members of the gang by node.
    """
    if len(ranked) != spec.nodes:
        return ""
    asked: dict[tuple[GroupKind, Level], list[NodeGroup]] = {}
    for group in communicating_seats(spec):
        level = min(group.within, group.preferred)
        if level is not Level.ANY:
            asked.setdefault((group.kind, max(level, Level.LEAF)), []).append(group)
    found = []
    for (kind, level), groups in asked.items():
        spans = [_spans(group, ranked, members, _leaf if level is Level.LEAF else _pod) for group in groups]
        if wide := sum(span > 1 for span in spans):
            size = max(len(group.seats) for group in groups)
            verb = "spans" if wide == 1 else "span"
            upto = "up to " if len({span for span in spans if span > 1}) > 1 else ""
            found.append(
                f"{kind} groups of {size} nodes: {wide} of {len(groups)} {verb} {upto}{max(spans)} {_PLURAL[level]}"
            )
    return "; ".join(found)


def _spans(
    group: NodeGroup, ranked: Sequence[str], members: Mapping[str, Member], switch: Callable[[Member], str]
) -> int:
    """The number of switches that the nodes of a group are below. Nodes whose switch is not known don't count."""
    nodes: Iterable[str] = (ranked[seat] for seat in group.seats)
    return len({name for node in nodes if node in members and (name := switch(members[node]))})


def _leaf(member: Member) -> str:
    return member.leaf


def _pod(member: Member) -> str:
    return next(iter(member.switches_above), "")
