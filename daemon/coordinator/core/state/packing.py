"""Whether the groups of a generation lie as near together as the job asks. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from muster.daemon.coordinator.core.state.communication import communicating_seats
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.placement.node_groups import NodeGroup

_PLURAL = {Level.LEAF: "leaves", Level.POD: "pods"}


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
