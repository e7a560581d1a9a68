"""What a placement must know of a gang: which seats communicate, the part of the fabric that its members are on, and
whether groups lie as near together as the job asks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from muster.daemon.coordinator.core.state.events import GangSpec, TopologySeen
from muster.daemon.coordinator.core.state.facts import FabricNoted, Seat
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.fabric.groups.axes import MEGATRON_ORDER, Axes, parse_order
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.changes import changes
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain
from muster.fabric.model.record import record_of
from muster.fabric.placement.failure_domains import SPREAD, FailureDomains, spread_over
from muster.fabric.placement.maps.rank_map import place
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.packed_time import StepTimes, step_times
from muster.fabric.placement.weights import Weight, usual_weights
from muster.fabric.sources.nesting import fabric_of_leaves
from muster.fabric.sources.node_reports import with_nvlink_domains

LastChoices = frozenset[tuple[str, int]]
"""Nodes that get a seat only if there are too few others; those with a higher number last."""

MOST_CHANGES = 20
"""Changes of the fabric that one fact names."""

_PLURAL = {Level.NVLINK: "NVLink domains", Level.LEAF: "leaves", Level.POD: "pods"}


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


def fabric_of_gang(gang: Gang, observed: ObservedState) -> Fabric:
    """The fabric of the gang's nodes, removed ones too.

    It is the part of what Slurm and the site say now. Until they have said it, it is what the journal holds of the
    gang; and if that is nothing, the leaf switches that the members had when they attached. Nodes of which nothing is
    known are attached to the root. NVLink domains, and the rates of adapters, are those that the nodes had reported
    when they attached.
    """
    domains = {node: member.nvlink_domain for node, member in gang.roster.members.items()}
    adapters = {node: member.adapter_bandwidth for node, member in gang.roster.members.items()}
    return with_nvlink_domains(_fabric_of_switches(gang, observed), domains, adapters)


def _fabric_of_switches(gang: Gang, observed: ObservedState) -> Fabric:
    nodes = frozenset(gang.roster.members).union(seat.node for seat in gang.roster.seats)
    if (site := _topology_of(gang, observed)) is not None:
        return site.fabric.part(nodes)
    if gang.roster.fabric is not None:
        return gang.roster.fabric.fabric.part(nodes)
    places = ((node, gang.roster.members[node].leaf if node in gang.roster.members else "") for node in nodes)
    return _fabric_of_leaves(tuple(sorted(places)))


def _topology_of(gang: Gang, observed: ObservedState) -> TopologySeen | None:
    """The topology that the partition of the gang's job uses; None: it is not known yet."""
    if observed.fabric is None or not observed.fabric.topologies:
        return None
    topologies, partition = observed.fabric.topologies, observed.gang(gang.id).partition
    if len(topologies) > 1 and not partition and gang.roster.fabric is not None:
        return None  # Slurm has not said yet in which partition the job is
    named = (one for one in topologies if partition and partition in one.partitions)
    default = next((one for one in topologies if one.default), topologies[0])
    return next(named, default)


@lru_cache(maxsize=16)
def _fabric_of_leaves(places: tuple[tuple[str, str], ...]) -> Fabric:
    return fabric_of_leaves(dict(places))


def pods_of(gang: Gang) -> dict[str, str]:
    """The name of the pod that each node is in, as far as the noted fabric has pods with names."""
    if gang.roster.fabric is None:
        return {}
    return {node: pod.name for pod in gang.roster.fabric.fabric.domains(Level.POD) for node in pod.nodes}


def note_fabric(gang: Gang, observed: ObservedState, fabric: Fabric) -> FabricNoted | None:
    """The fact that seats are chosen with `fabric`; None if the journal holds that already, or nothing is known."""
    seen = observed.fabric
    if seen is None:
        return None
    site = _topology_of(gang, observed)
    warnings = (seen.problem,) if seen.problem else site.warnings if site is not None else ()
    if site is None and not (warnings and gang.roster.fabric is None):
        return None  # no news, only what was known before
    record = record_of(fabric)
    if gang.roster.fabric == record or (
        gang.roster.fabric is None and len(record.domains) == 1 and not record.details + warnings
    ):
        return None
    return FabricNoted(gang.id, record, (), warnings)


def note_change(gang: Gang, observed: ObservedState) -> FabricNoted | None:
    """The fact that the fabric has changed for nodes of the gang, with the changes in words; None if it has not."""
    if not gang.roster.seats or gang.final or (site := _topology_of(gang, observed)) is None:
        return None
    fabric = fabric_of_gang(gang, observed)
    if gang.roster.fabric is None:
        return note_fabric(gang, observed, fabric)
    before = gang.roster.fabric.fabric
    lines = changes(before, fabric.part(before.nodes))
    if not lines:
        return None
    ranked = [seat.node for seat in sorted(gang.roster.seats, key=lambda seat: seat.group_rank)]
    wider = wider_than_asked(gang.spec, ranked, fabric)
    return FabricNoted(gang.id, record_of(fabric), lines[:MOST_CHANGES], site.warnings, wider)


def failure_domains_of(fabric: Fabric, words: tuple[str, ...] | None = None) -> FailureDomains:
    """What the nodes of a gang fail together with: of the kinds in `words` (`GangSpec.spread_replicas`), or of all."""
    return _failure_domains(fabric, *((SPREAD, frozenset()) if words is None else spread_over(words)))


@lru_cache(maxsize=32)  # with each start, and with each round of probes
def _failure_domains(
    fabric: Fabric, kinds: tuple[FailureDomain, ...], required: frozenset[FailureDomain]
) -> FailureDomains:
    return FailureDomains(fabric, kinds, required)


@lru_cache(maxsize=64)  # a start that waits asks again with each event
def least_communication(
    fabric: Fabric, groups: tuple[NodeGroup, ...], nodes: frozenset[str], seats: int, last_choices: LastChoices
) -> tuple[str, ...]:
    """The node of each seat, by group rank. Arguments as for `rank_map.place`."""
    return place(fabric, groups, nodes, seats, dict(last_choices)).seats


def communication_times(spec: GangSpec, ranked: Sequence[str], fabric: Fabric) -> StepTimes:
    """The predicted communication of a step, and what it would be if all groups were packed as the job asks. Arguments
    as for `wider_than_asked`."""
    return step_times(fabric, communicating_seats(spec), ranked)


def wider_than_asked(spec: GangSpec, ranked: Sequence[str], fabric: Fabric) -> str:
    """In words, which groups lie in more domains than the job asks: "tensor groups of 4 nodes: 1 of 4 spans 2 leaves".
    Empty if none does, or if the fabric has no such domains.

    Args:
        ranked: the node of each seat. A gang with fewer nodes than its spec has no groups but those of data.
        fabric: has all of them.
    """
    if len(ranked) != spec.nodes:
        return ""
    tightest = Level.NVLINK if fabric.domains(Level.NVLINK) else Level.LEAF
    asked: dict[tuple[GroupKind, Level], list[NodeGroup]] = {}
    for group in communicating_seats(spec):
        level = min(group.within, group.preferred)
        if level is not Level.ANY:
            least = Level.NVLINK if group.within <= Level.NVLINK else tightest  # a requirement is kept, or it is not
            asked.setdefault((group.kind, max(level, least)), []).append(group)
    found = []
    for (kind, level), groups in asked.items():
        spans = [_spans([ranked[seat] for seat in group.seats], fabric, level) for group in groups]
        if wide := sum(span > 1 for span in spans):
            size = max(len(group.seats) for group in groups)
            verb = "spans" if wide == 1 else "span"
            upto = "up to " if len({span for span in spans if span > 1}) > 1 else ""
            where = f"{verb} {upto}{max(spans)} {_PLURAL[level]}"
            if level is Level.NVLINK and not fabric.domains(level):
                where = f"{'is' if wide == 1 else 'are'} in no NVLink domain of several nodes"
            found.append(f"{kind} groups of {size} nodes: {wide} of {len(groups)} {where}")
    return "; ".join(found)


def closer_than_required(
    spec: GangSpec,
    seats: Iterable[Seat],
    spares: Iterable[Seat],
    fabric: Fabric,
    protection_groups: Iterable[Sequence[str]] = (),
) -> str:
    """In words, which nodes share what the job requires them not to share; empty if none do."""
    copies = [(seat.node, holder) for seat in seats for holder in seat.holders]
    copies += [pair for group in protection_groups for pair in combinations(group, 2)]
    found = []
    for what, pairs, words in (
        (spec.redundancy.together, copies, spec.spread_replicas),
        ("spares", list(combinations((seat.node for seat in spares), 2)), spec.spread_spares),
    ):
        apart = failure_domains_of(fabric, words)
        if broken := sum(apart.breaks_requirement(one, other) for one, other in pairs):
            required = " or ".join(word.removeprefix("require ") for word in words if word.startswith("require "))
            found.append(f"{broken} of {len(pairs)} pairs of {what} share their {required}")
    return "; ".join(found)


def _spans(nodes: Iterable[str], fabric: Fabric, level: Level) -> int:
    """The number of domains of `level` that the nodes are in. A network tier that the fabric lacks holds all nodes.
    Nodes of which nothing is known don't count. NVLink is the opposite: without a domain, each node is alone.
    """
    if level is Level.NVLINK:
        return len({fabric.domain(node, level).nodes for node in nodes})
    if not fabric.domains(level):
        return 1
    found = (next((d.nodes for d in fabric.path(node) if d.level <= level), None) for node in nodes)
    return len({domain for domain in found if domain is not None})
