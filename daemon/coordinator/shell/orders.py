"""What each agent shall do, as a pure function of the durable state: `Orders(gang).of(node)`.

An order is a level, not an edge: it states the whole duty. The same durable state gives the same order, so a restarted
coordinator says again what it said before. Nodes with the same duty get the same order.
"""

from __future__ import annotations

from collections.abc import Collection

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Flush, Gang, Member, PoolRequest
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.v1 import agent_pb2 as pb
from muster.v1 import common_pb2

_FENCING = frozenset({Phase.PREFLIGHT, Phase.RECOVERING, Phase.DRAINING})
_GOING = frozenset({Phase.STARTING, Phase.RUNNING})


class Orders:
    """The orders of one gang, as of now: to be made anew when anything but who its members are has changed.

    Within one serial an order changes only in what need not be done any more: a flush that is over, memory to be kept.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._serial = gang.serial
        self._carriers = {seat.node for seat in gang.seats}
        self._kept = {name for name, member in gang.members.items() if _kept(gang, member)}
        self._members = _members(gang, self._kept)
        self._asks: dict[str, list[PoolRequest]] = {}
        for request in gang.pool.values():
            if not request.job:
                self._asks.setdefault(request.via, []).append(request)
        self._built: dict[tuple[str, bool, bool, str], pb.Order] = {}

    def of(self, node: str) -> pb.Order:
        """The order for the agent on `node`: the very same object for all nodes of one duty."""
        member = self._gang.members.get(node)
        asks = node if node in self._asks else ""
        duty = (member.out if member else "", node in self._kept, node in self._carriers, asks)
        if duty not in self._built:
            self._built[duty] = self._order(*duty)
        return self._built[duty]

    def _order(self, out: str, kept: bool, carries: bool, asks: str) -> pb.Order:
        gang = self._gang
        order = pb.Order(serial=self._serial, generation=max(gang.generation, 0), members=self._members)
        if _flushing(gang) and gang.flush:
            order.flush.CopyFrom(_flush(gang.flush))
        if gang.stop is not None:
            order.stop = gang.stop.reason
        for request in self._asks.get(asks, ()):
            order.pool.add(serial=request.serial, options=request.options)
        if gang.final:
            _leave(order, gang.exit_code, gang.reason)
        elif out and not kept:
            _leave(order, 0, out)
        elif gang.phase is Phase.REQUEUED:
            _leave(order, 0, gang.reason)
            order.requeued = not out
        elif gang.phase in _FENCING:
            order.duty = pb.DUTY_FENCE
            order.generation, order.store_node = max(gang.fenced, 0), gang.store_node
        elif gang.phase in _GOING and carries:
            _run(order, gang)
        else:
            order.duty = pb.DUTY_HOLD
        return order


def _kept(gang: Gang, member: Member) -> bool:
    """A member that is out and lives stays while its memory may be wanted: until sources are chosen, until the
    generation that draws on it has made a step, until the flush that it writes a part of is over."""
    if not member.out or not member.alive:
        return False
    if gang.phase in _FENCING or gang.keeps(member.node):
        return True
    writers = gang.flush.sources if gang.flush and _flushing(gang) else ()
    return any(source.node == member.node for source in writers)


def _flushing(gang: Gang) -> bool:
    return gang.flush is not None and not gang.flush.path and not gang.flush.error


def _leave(order: pb.Order, exit_code: int, reason: str) -> None:
    order.duty = pb.DUTY_EXIT
    order.exit_code, order.reason = exit_code, reason


def _run(order: pb.Order, gang: Gang) -> None:
    per_node = gang.spec.ranks_per_node
    order.duty = pb.DUTY_RUN
    order.world_size = len(gang.seats) * per_node
    for seat in sorted(gang.seats, key=lambda seat: seat.group_rank):
        for local in range(per_node):
            order.places.add(rank=seat.group_rank * per_node + local, node=seat.node, local_rank=local)
    master = gang.members.get(gang.master_node)
    order.master_addr = master.peer_address.rpartition(":")[0].strip("[]") if master else ""
    order.master_port = gang.master_port
    order.keep_stacks = gang.hang is not None
    if gang.version:
        order.restore.version.CopyFrom(_version(gang.version))
        order.restore.sources.extend(map(_source, gang.sources))
    elif gang.durable_path:
        order.restore.durable_path = gang.durable_path


def _members(gang: Gang, kept: Collection[str]) -> list[common_pb2.Member]:
    seats = {seat.node: seat for seat in (*gang.spares, *gang.seats)}
    # One that is kept for its memory is counted among them: whoever fetches from it needs its address.
    staying = [gang.members[node] for node in sorted(kept)]
    return [_member(member, seats.get(member.node)) for member in (*gang.present(), *staying)]


def _member(member: Member, seat: facts.Seat | None) -> common_pb2.Member:
    if member.out:
        seat = None
    return common_pb2.Member(
        node=member.node,
        peer_address=member.peer_address,
        incarnation=member.incarnation,
        leaf=member.leaf,
        group_rank=seat.group_rank if seat else -1,
        buddy=seat.buddy if seat else "",
        neighbours=seat.neighbours if seat else (),
    )


def _version(version: Version) -> common_pb2.Version:
    return common_pb2.Version(generation=version.generation, step=version.step)


def _source(source: facts.Source) -> pb.RestoreSource:
    tier = pb.TIER_OWN if source.own else pb.TIER_BUDDY
    return pb.RestoreSource(rank=source.rank, tier=tier, node=source.node, digest=source.digest)


def _flush(flush: Flush) -> pb.FlushOrder:
    return pb.FlushOrder(
        serial=flush.serial,
        version=_version(flush.version),
        sources=map(_source, flush.sources),
        reason=flush.reason,
    )
