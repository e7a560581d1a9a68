"""Orders: what each agent shall do, as a pure function of the durable state: `Orders(gang).for_node(node)`.

An order states the whole duty of an agent, not a change. The same durable state gives the same order, so a restarted
coordinator repeats what it said before. Nodes with the same duty get the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from muster.checkpoint.redundancy import wire
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.checkpoint import Flush
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.slurm_jobs import PoolRequest
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.communication import pods_of
from muster.daemon.coordinator.core.turn.placement import WATCHED_PEER_COUNT
from muster.v1 import agent_pb2 as pb
from muster.v1 import common_pb2

_FENCING = frozenset({Phase.PREFLIGHT, Phase.RECOVERING, Phase.DRAINING})
_TRAINING = frozenset({Phase.STARTING, Phase.RUNNING})


class Orders:
    """The orders of one gang as of now. Build new ones when anything but the set of members has changed.

    Within one serial, an order changes only by dropping work: a flush has ended, memory is no longer needed.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._serial = gang.order_serial
        self._rank_nodes = {seat.node for seat in gang.roster.seats}
        self._staying = {name for name, member in gang.roster.members.items() if _stays_for_memory(gang, member)}
        self._members = _member_messages(gang, self._staying)
        self._output_node = _output_node(gang)
        self._pool_requests: dict[str, list[PoolRequest]] = {}
        for request in gang.growth.pool.values():
            if not request.job:
                self._pool_requests.setdefault(request.requesting_node, []).append(request)
        self._built: dict[tuple[str, bool, bool, str], pb.Order] = {}

    def for_node(self, node: str) -> pb.Order:
        """The order for the agent on `node`: the same object for all nodes with the same duty."""
        member = self._gang.roster.members.get(node)
        pool_node = node if node in self._pool_requests else ""
        duty = (member.removal_reason if member else "", node in self._staying, node in self._rank_nodes, pool_node)
        if duty not in self._built:
            self._built[duty] = self._build(*duty)
        return self._built[duty]

    def _build(self, out: str, stays: bool, has_ranks: bool, pool_node: str) -> pb.Order:
        gang = self._gang
        order = pb.Order(serial=self._serial, generation=max(gang.newest.generation, 0), members=self._members)
        order.output_node = self._output_node
        if (flush := gang.checkpoint.flush) is not None and not flush.is_over:
            order.flush.CopyFrom(_flush_message(flush, gang.spec.identity))
        if gang.plans.stop is not None:
            order.stop = gang.plans.stop.reason
        for request in self._pool_requests.get(pool_node, ()):
            order.pool.add(serial=request.serial, options=request.options)
        if gang.final:
            _set_exit(order, gang.exit_code, gang.reason)
            order.job_over = True
        elif out and not stays:
            _set_exit(order, 0, out)
        elif gang.phase is Phase.REQUEUED:
            _set_exit(order, 0, gang.reason)
            order.requeued = not out
        elif gang.phase in _FENCING:
            order.duty = pb.DUTY_FENCE
            order.generation, order.store_node = max(gang.recovery.fenced_generation, 0), gang.recovery.next_store_node
        elif gang.phase in _TRAINING and has_ranks:
            _set_run(order, gang)
        else:
            order.duty = pb.DUTY_HOLD
        return order


def _stays_for_memory(gang: Gang, member: Member) -> bool:
    """Whether a live member that was removed stays because its shards may be needed.

    It stays until the restore plan is chosen, until the generation that restores from it has finished a step, and until
    a flush that it takes part in has ended.
    """
    if not member.removed or not member.alive:
        return False
    if gang.phase in _FENCING or gang.needs_memory_of(member.node):
        return True
    flush = gang.checkpoint.flush
    writers = flush.sources if flush is not None and not flush.is_over else ()
    return any(source.node == member.node for source in writers)


def _output_node(gang: Gang) -> str:
    """The node that goes on with the output of a user's own script whose node is lost. Empty: srun does."""
    host = gang.roster.batch_host
    if not gang.spec.own_nodes or host is None or not host.gone:
        return ""
    return next((member.node for member in gang.roster.present()), "")


def _set_exit(order: pb.Order, exit_code: int, reason: str) -> None:
    order.duty = pb.DUTY_EXIT
    order.exit_code, order.reason = exit_code, reason


def _set_run(order: pb.Order, gang: Gang) -> None:
    per_node = gang.spec.ranks_per_node
    order.duty = pb.DUTY_RUN
    order.world_size = len(gang.roster.seats) * per_node
    for seat in sorted(gang.roster.seats, key=lambda seat: seat.group_rank):
        for local in range(per_node):
            order.places.add(rank=seat.group_rank * per_node + local, node=seat.node, local_rank=local)
    master = gang.roster.members.get(gang.newest.current_store_node)
    order.master_addr = master.peer_address.rpartition(":")[0].strip("[]") if master else ""
    order.master_port = gang.newest.current_store_port
    order.keep_stacks = gang.findings.hang is not None
    order.agreed_groups.extend(gang.newest.agreed_groups)
    order.mtbf_s = gang.newest.mtbf_s
    order.parity_groups.extend(wire.group_messages(gang.restore.protection_groups))
    order.replicas_differ = gang.findings.disagreement is not None and gang.findings.disagreement.comparison_ends
    if gang.plans.swap is not None:
        order.planned_swap = gang.plans.swap.reason
    if gang.restore.restored_version:
        order.restore.version.CopyFrom(_version_message(gang.restore.restored_version))
        order.restore.sources.extend(source_messages((*gang.restore.restore_sources, *gang.restore.other_sources)))
        order.restore.written_ranks = gang.ranks_of(gang.restore.restored_version)
        order.restore.resharded = gang.restore.resharded
    elif gang.checkpoint.durable_path:
        order.restore.durable_path = gang.checkpoint.durable_path
        order.restore.skip_to_step = gang.restore.skip_to_step


def _member_messages(gang: Gang, staying: Collection[str]) -> list[common_pb2.Member]:
    seats = {seat.node: seat for seat in (*gang.roster.spares, *gang.roster.seats)}
    # A member that stays for its memory is listed, too: the agents that fetch from it need its address.
    listed = [*gang.roster.present(), *(gang.roster.members[node] for node in sorted(staying))]
    nodes = [member.node for member in listed]
    known, pods = frozenset(nodes), pods_of(gang)
    messages = []
    for position, member in enumerate(listed):
        seat = None if member.removed else seats.get(member.node)
        message = _member_message(member, seat, pods.get(member.node, ""))
        message.neighbours.extend(peer for peer in (seat.watched_peers if seat else ()) if peer in known)
        if not message.neighbours and gang.roster.seats and not member.removed:
            message.neighbours.extend(_next_ones(nodes, position))
        messages.append(message)
    return messages


def _next_ones(nodes: Sequence[str], position: int) -> list[str]:
    """The peers that a member watches if it has no seat, or if all those of its seat have left.

    An agent that watches nobody notices no silence, and never ends its ranks because of one.
    """
    return [nodes[(position + 1 + n) % len(nodes)] for n in range(min(WATCHED_PEER_COUNT, len(nodes) - 1))]


def _member_message(member: Member, seat: facts.Seat | None, pod: str) -> common_pb2.Member:
    return common_pb2.Member(
        node=member.node,
        peer_address=member.peer_address,
        incarnation=member.incarnation,
        leaf=member.leaf,
        group_rank=seat.group_rank if seat else -1,
        buddy=seat.holder if seat else "",
        more_buddies=seat.more_holders if seat else (),
        pod=pod,
        nvlink_domain=member.nvlink_domain,
    )


def _version_message(version: Version) -> common_pb2.Version:
    return common_pb2.Version(generation=version.generation, step=version.step)


def source_messages(sources: Iterable[facts.ShardSource]) -> Iterator[pb.RestoreSource]:
    """The sources of a restore or a flush. The sources of a lost shard are the parts that it is in, in their order:
    the journal need not name them."""
    named: Counter[int] = Counter()
    for source in sources:
        tier = pb.TIER_OWN if source.primary else pb.TIER_BUDDY
        message = pb.RestoreSource(rank=source.rank, tier=tier, node=source.node, digest=source.digest)
        if source.combined_ranks:
            wire.mark_combined(message, source.combined_ranks, named[source.rank])
            named[source.rank] += 1
        yield message


def _flush_message(flush: Flush, job_identity: str) -> pb.FlushOrder:
    return pb.FlushOrder(
        serial=flush.serial,
        version=_version_message(flush.version),
        sources=source_messages(flush.sources),
        reason=flush.reason,
        job_identity=job_identity,
    )
