"""The index of one gang, counted as reports come in: ranks that run, agents that are silent, nodes to look at.

All of it follows from durable state and observed state. It is kept because a gang of a thousand nodes sends a thousand
reports a step, and a report must cost as much as one node does. Sets of nodes have no order: sort a set before a
decision depends on the order.
"""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import AgentStatus, CheckOutcome
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedAgent, ObservedGang
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import FENCING
from muster.daemon.transport.fencing_timeouts import ACCUSE_AFTER_S
from muster.fabric.model.fabric import Fabric

_NOTHING = AgentStatus()


@dataclass(frozen=True, slots=True)
class RankCount:
    """Ranks of the running generation on one node.

    `reported`: all of them. `progressed`: with a finished step. `exited_cleanly`: exited with 0. `stopped`: exited with
    0, or with their last step finished, as they were asked. `failed`: one has failed. `in_declared_phase`: one is in a
    declared phase. `not_finite`: one reports a value that is not finite. `silent`: running, without a
    sign of life. `signing`: running, with signs of life. `idle_quarters`: the least of all ranks that have not exited
    (RankState); None: all have exited, or none is known.
    """

    reported: int = 0
    progressed: int = 0
    exited_cleanly: int = 0
    stopped: int = 0
    failed: bool = False
    in_declared_phase: bool = False
    not_finite: bool = False
    silent: int = 0
    signing: int = 0
    idle_quarters: int | None = None

    @staticmethod
    def of(status: AgentStatus, generation: int) -> "RankCount":
        """Count those of `generation`."""
        mine = status.ranks_of(generation)
        return RankCount(
            len(mine),
            sum(rank.progressed for rank in mine),
            sum(rank.exit_code == 0 for rank in mine),
            sum(rank.exit_code == 0 or rank.stopped_step > 0 for rank in mine),
            any(not rank.running and rank.exit_code for rank in mine),
            any(rank.declared and rank.exit_code is None for rank in mine),
            any(rank.not_finite is not None for rank in mine),
            sum(rank.running and bool(rank.silent_s) for rank in mine),
            sum(rank.running and rank.silent_s == 0 for rank in mine),
            min((rank.idle_quarters or 0 for rank in mine if rank.exit_code is None), default=None),
        )


_NO_RANKS = RankCount()


@dataclass(slots=True)
class GangIndex:
    """The index of one gang. It is true of every node of the gang, except for the nodes in `to_recount`.

    `present`: members that may carry ranks. Of these:
      `in_service`: the agent is attached, and the node is in service.
      `out_of_service`: the node is out of service.
      `agent_failed`: the agent has reported an error that no order mends.
      `sigterm_received`: Slurm has told the agent to end.
      `check_pending`: the gang wants its nodes checked, and no fact says yet what the check of this node has found.
      `check_ended`: of these, the agent has reported it. `check_failed`: no rank shall start on the node.
    `expected`: the present members, and the members that were removed alive and carried ranks of the fenced generation.
    Of these:
      `unattached`: the agent has no open stream.
      `unfenced`: the agent has not reported that all ranks of the fenced generation have ended.
    Of the nodes that carry ranks:
      `crashed`: a rank has failed.
      `in_declared_phase`: a rank is in a declared phase.
      `with_silent_rank`: a rank sends no signs of life any more.
      `with_active_rank`: a rank is not known to be idle.
      `stacks_missing`: the stacks of the ranks are not written yet.
      `not_finite`: a rank reports a loss or a gradient norm that is not finite.
      `restored`: all ranks of this generation have their states from memory.
      `disagreeing`: it carries rank 0, and its agent says that replicas disagree in this generation.
    `accusers`: the agent misses a watched peer.
    `corrupt`: the agent reports copies of shards that are corrupt.
    `to_release`: the member is removed, alive, and not released yet.
    `lacking`: the member is removed, and its agent says why the job can't run there.
    `flush_pending`: the agent still writes a part of the running flush. `flush_failed`: the agent could not write it.
    `reported`, `progressed`, `exited_cleanly`, `stopped`, `silent`, `signing`: numbers of ranks of the running
    generation.
    """

    present: set[str] = field(default_factory=set)
    in_service: set[str] = field(default_factory=set)
    out_of_service: set[str] = field(default_factory=set)
    agent_failed: set[str] = field(default_factory=set)
    sigterm_received: set[str] = field(default_factory=set)
    check_pending: set[str] = field(default_factory=set)
    check_ended: set[str] = field(default_factory=set)
    check_failed: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    unattached: set[str] = field(default_factory=set)
    unfenced: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    in_declared_phase: set[str] = field(default_factory=set)
    with_silent_rank: set[str] = field(default_factory=set)
    with_active_rank: set[str] = field(default_factory=set)
    stacks_missing: set[str] = field(default_factory=set)
    not_finite: set[str] = field(default_factory=set)
    disagreeing: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)
    to_release: set[str] = field(default_factory=set)
    lacking: set[str] = field(default_factory=set)
    flush_pending: set[str] = field(default_factory=set)
    flush_failed: set[str] = field(default_factory=set)
    reported: int = 0
    progressed: int = 0
    exited_cleanly: int = 0
    stopped: int = 0
    silent: int = 0
    signing: int = 0
    to_recount: set[str] = field(default_factory=set)
    """Nodes to count again."""
    seats: dict[str, facts.Seat] = field(default_factory=dict)
    flush_writers: frozenset[str] = frozenset()
    time_fenced_at: float = 0.0
    """Until then (seconds) ranks may run on nodes that left in silence; 0: not computed yet."""
    reported_since: set[str] = field(default_factory=set)
    """Nodes whose status has come since `time_fenced_at` was computed."""
    heartbeat_check_at: float = 0.0
    """Until then (seconds) no attached agent can have missed the heartbeat timeout; 0: not computed yet."""
    _ranks: dict[str, RankCount] = field(default_factory=dict)
    fabric: Fabric | None = None
    """The fabric of the gang's nodes; None: not looked for yet."""
    _in_fabric_order: list[str] = field(default_factory=list)
    _serial: int = -1
    _behind: set[str] = field(default_factory=set)

    @staticmethod
    def of_gang(gang: Gang) -> "GangIndex":
        """A new index of `gang`, with every node to be counted."""
        seats = {seat.node: seat for seat in (*gang.roster.spares, *gang.roster.seats)}
        writers = (
            frozenset(source.node for source in gang.checkpoint.flush.sources) if gang.checkpoint.flush else frozenset()
        )
        return GangIndex(to_recount={*gang.roster.members, *seats, *writers}, seats=seats, flush_writers=writers)

    def recount(self, gang: Gang, node: str, agent: ObservedAgent | None, fit: bool) -> None:
        """Count `node` again: its member in `gang`, its `agent`, and whether the node is in service (`fit`)."""
        member, status = gang.roster.members.get(node), agent.status if agent else _NOTHING
        attached = agent is not None and agent.attached
        present = member is not None and not member.removed
        expected = present or (member is not None and self._must_still_fence(gang, member))
        _put(self.present, node, present)
        _put(self.in_service, node, present and attached and fit)
        _put(self.out_of_service, node, present and not fit)
        _put(self.agent_failed, node, present and bool(status.failure))
        _put(self.sigterm_received, node, present and bool(status.sigterm_notice))
        self._count_check(gang, node, status, member if present else None)
        _put(self.expected, node, expected)
        _put(self.unattached, node, expected and not attached)
        fenced = attached and status.fenced_generation >= gang.recovery.fenced_generation
        _put(self.unfenced, node, expected and not fenced)
        _put(self.to_release, node, member is not None and _awaits_release(member))
        _put(self.lacking, node, attached and member is not None and member.removed and bool(status.failure))
        _put(self._behind, node, present and status.order_serial < self._serial)
        self._count_flush(gang, node, status)
        self._count_seat(gang, node, status, attached)

    def _count_check(self, gang: Gang, node: str, status: AgentStatus, member: Member | None) -> None:
        pending = gang.spec.preflight and member is not None and member.check is None
        check = status.node_check
        _put(self.check_pending, node, pending)
        _put(self.check_ended, node, pending and check is not None and check.outcome is not CheckOutcome.RUNNING)
        _put(self.check_failed, node, member is not None and member.failed_check)

    def _must_still_fence(self, gang: Gang, member: Member) -> bool:
        """The member was removed alive, and its ranks of the fenced generation must end as well."""
        seat = self.seats.get(member.node)
        if gang.phase not in FENCING or not gang.recovery.recoveries or seat is None or seat.group_rank < 0:
            return False
        return member.removed and member.alive and member.node in gang.recovery.recoveries[-1].nodes_out

    def _count_flush(self, gang: Gang, node: str, status: AgentStatus) -> None:
        writes = node in self.flush_writers
        over = gang.checkpoint.flush is not None and status.flushed_serial >= gang.checkpoint.flush.serial
        _put(self.flush_pending, node, writes and not over)
        _put(self.flush_failed, node, writes and over and bool(status.flush_error))

    def _count_seat(self, gang: Gang, node: str, status: AgentStatus, attached: bool) -> None:
        seat, ranks = self.seats.get(node), _NO_RANKS
        carries = seat is not None and seat.group_rank >= 0
        if carries:
            ranks = RankCount.of(status, gang.newest.generation)
        _put(self.crashed, node, ranks.failed)
        _put(self.in_declared_phase, node, ranks.in_declared_phase)
        _put(self.not_finite, node, ranks.not_finite)
        _put(self.corrupt, node, seat is not None and bool(status.corrupt_copies))
        _put(self.restored, node, carries and _has_restored(status, gang.newest.generation))
        _put(
            self.disagreeing,
            node,
            seat is not None and seat.group_rank == 0 and _disagrees(status, gang.newest.generation),
        )
        _put(self.with_silent_rank, node, ranks.silent > 0)
        _put(self.with_active_rank, node, carries and (ranks.reported == 0 or ranks.idle_quarters == 0))
        _put(self.stacks_missing, node, carries and status.stacks_generation < gang.newest.generation)
        _put(self.accusers, node, attached and seat is not None and bool(silent_watched_peers(seat, status)))
        before = self._ranks.get(node, _NO_RANKS)
        if ranks != before:
            self._ranks[node] = ranks
            self.reported += ranks.reported - before.reported
            self.progressed += ranks.progressed - before.progressed
            self.exited_cleanly += ranks.exited_cleanly - before.exited_cleanly
            self.stopped += ranks.stopped - before.stopped
            self.silent += ranks.silent - before.silent
            self.signing += ranks.signing - before.signing

    def agents_behind(self, gang: Gang, seen: ObservedGang) -> set[str]:
        """The present members whose agents have not carried out the newest order."""
        if self._serial != gang.order_serial:
            self._serial = gang.order_serial
            self._behind = {node for node in self.present if seen.status(node).order_serial < gang.order_serial}
        return self._behind

    def in_fabric_order(self, fabric: Fabric) -> list[str]:
        """The present members along the tree of `fabric`, which is that of the gang."""
        if not self._in_fabric_order:
            self._in_fabric_order = sorted(self.present, key=fabric.order.__getitem__)
        return self._in_fabric_order

    def idle_quarters(self) -> int:
        """Quarters in a row in which every rank that has not exited was idle; 0: not all ranks are known to be idle."""
        if self.with_active_rank:
            return 0
        quarters = (ranks.idle_quarters for ranks in self._ranks.values())
        return min((number for number in quarters if number is not None), default=0)

    def note_membership_change(self) -> None:
        """A member has joined or was removed."""
        self.time_fenced_at = 0.0
        self.forget_fabric()

    def forget_fabric(self) -> None:
        """The fabric of the gang's nodes may have changed."""
        self.fabric, self._in_fabric_order = None, []


def silent_watched_peers(seat: facts.Seat, status: AgentStatus) -> list[str]:
    """Watched peers that have not answered the agent of `seat` for as long as an accusation needs."""
    return [node for node in seat.watched_peers if status.heard_s.get(node, 0.0) >= ACCUSE_AFTER_S]


def _disagrees(status: AgentStatus, generation: int) -> bool:
    return status.disagreement is not None and status.disagreement.version.generation == generation


def _has_restored(status: AgentStatus, generation: int) -> bool:
    restore = status.restore
    return restore is not None and restore.generation == generation and restore.ranks_done >= restore.ranks


def _awaits_release(member: Member) -> bool:
    return member.removed and member.alive and not member.released and not member.batch_host


def _put(nodes: set[str], node: str, belongs: bool) -> None:
    if belongs:
        nodes.add(node)
    else:
        nodes.discard(node)
