"""One gang, counted as reports come in: how many ranks run, whose agent is missing, whom to look at.

All of it follows from durable state and observed state; it is kept because a gang of a thousand nodes reports a
thousand times a step, and each report must cost what one node's does. Sets of nodes have no order: whoever decides by
one sorts it first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state import facts, placement
from muster.daemon.coordinator.core.state.durable_state import Gang, Member
from muster.daemon.coordinator.core.state.events import RankState, Status
from muster.daemon.coordinator.core.state.observed_state import ObservedAgent, ObservedGang
from muster.daemon.coordinator.core.state.state_tables import FENCING
from muster.daemon.transport.fencing_timeouts import ACCUSE_AFTER_S

_NOTHING = Status()


@dataclass(frozen=True, slots=True)
class RankCount:
    """Ranks of the running generation on one node: reported, with a step finished, exited with 0; did one fail,
    is one in a declared phase."""

    reported: int = 0
    progressed: int = 0
    done: int = 0
    failed: bool = False
    in_phase: bool = False

    @staticmethod
    def of(ranks: Iterable[RankState], generation: int) -> "RankCount":
        """Count those of `generation`."""
        mine = of_generation(ranks, generation)
        return RankCount(
            len(mine),
            sum(rank.progressed for rank in mine),
            sum(rank.exit_code == 0 for rank in mine),
            any(not rank.running and rank.exit_code for rank in mine),
            any(rank.declared and rank.exit_code is None for rank in mine),
        )


_NO_RANKS = RankCount()


def of_generation(ranks: Iterable[RankState], generation: int) -> list[RankState]:
    """Those of `ranks` that belong to `generation`."""
    return [rank for rank in ranks if rank.generation == generation]


@dataclass(slots=True)
class GangIndex:
    """The counts of one gang, true of its nodes but for those that are `marked`.

    `present` are the members that may carry ranks; of these are `here` whose agent is in touch and whose node is in
    service, `unfit` whose node is not, `failing` whose agent can't go on, `noticed` whom Slurm has told to end.
    `expected` are the present and those who went out alive with ranks of the fenced generation; of these are
    `unattached` whose agent is out of touch, `unfenced` who did not say that their ranks have ended. `crashed` carry a
    rank that failed, `in_phase` one in a declared phase, `unstacked` such whose stacks are not kept; `watchers` miss a
    neighbour; `leaving` are out, alive, and not let go yet; `unwritten` write a
    part of the flush under way, `botched` could not.
    """

    present: set[str] = field(default_factory=set)
    here: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    noticed: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    unattached: set[str] = field(default_factory=set)
    unfenced: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    in_phase: set[str] = field(default_factory=set)
    unstacked: set[str] = field(default_factory=set)
    watchers: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)
    botched: set[str] = field(default_factory=set)
    reported: int = 0
    progressed: int = 0
    done: int = 0
    marked: set[str] = field(default_factory=set)
    """Nodes to be counted anew."""
    seats: dict[str, facts.Seat] = field(default_factory=dict)
    writers: frozenset[str] = frozenset()
    quiet_at: float = 0.0
    """Before that ranks may run on nodes that left in silence; 0: that was not looked at yet."""
    said: set[str] = field(default_factory=set)
    """Whose status has come since that was looked at."""
    lease_at: float = 0.0
    """Before that no agent that is in touch can have been mute for too long; 0: that was not looked at yet."""
    _ranks: dict[str, RankCount] = field(default_factory=dict)
    _by_fabric: list[Member] = field(default_factory=list)
    _serial: int = -1
    _behind: set[str] = field(default_factory=set)

    @staticmethod
    def begin(gang: Gang) -> "GangIndex":
        """The index of `gang`, with every node still to be counted."""
        seats = {seat.node: seat for seat in (*gang.spares, *gang.seats)}
        writers = frozenset(source.node for source in gang.flush.sources) if gang.flush else frozenset()
        return GangIndex(marked={*gang.members, *seats, *writers}, seats=seats, writers=writers)

    def recount(self, gang: Gang, node: str, agent: ObservedAgent | None, fit: bool) -> None:
        """Count `node` anew: its member in `gang`, its `agent`, and whether it is in service (`fit`)."""
        member, status = gang.members.get(node), agent.status if agent else _NOTHING
        attached = agent is not None and agent.attached
        present = member is not None and not member.out
        expected = present or (member is not None and self._goes(gang, member))
        _put(self.present, node, present)
        _put(self.here, node, present and attached and fit)
        _put(self.unfit, node, present and not fit)
        _put(self.failing, node, present and bool(status.failure))
        _put(self.noticed, node, present and bool(status.notice))
        _put(self.expected, node, expected)
        _put(self.unattached, node, expected and not attached)
        _put(self.unfenced, node, expected and not (attached and status.fenced >= gang.fenced))
        _put(self.leaving, node, member is not None and _leaves(member))
        _put(self._behind, node, present and status.order_serial < self._serial)
        self._count_flush(gang, node, status)
        self._count_seat(gang, node, status, attached)

    def _goes(self, gang: Gang, member: Member) -> bool:
        """It went out alive, and its ranks of the fenced generation must end as everybody's."""
        seat = self.seats.get(member.node)
        if gang.phase not in FENCING or not gang.recoveries or seat is None or seat.group_rank < 0:
            return False
        return bool(member.out) and member.alive and member.node in gang.recoveries[-1].nodes_out

    def _count_flush(self, gang: Gang, node: str, status: Status) -> None:
        writes = node in self.writers
        over = gang.flush is not None and status.flushed_serial >= gang.flush.serial
        _put(self.unwritten, node, writes and not over)
        _put(self.botched, node, writes and over and bool(status.flush_error))

    def _count_seat(self, gang: Gang, node: str, status: Status, attached: bool) -> None:
        seat, ranks = self.seats.get(node), _NO_RANKS
        carries = seat is not None and seat.group_rank >= 0
        if carries:
            ranks = RankCount.of(status.ranks, gang.generation)
        _put(self.crashed, node, ranks.failed)
        _put(self.in_phase, node, ranks.in_phase)
        _put(self.unstacked, node, carries and status.stacks < gang.generation)
        _put(self.watchers, node, attached and seat is not None and bool(silent_neighbours(seat, status)))
        before = self._ranks.get(node, _NO_RANKS)
        if ranks != before:
            self._ranks[node] = ranks
            self.reported += ranks.reported - before.reported
            self.progressed += ranks.progressed - before.progressed
            self.done += ranks.done - before.done

    def behind(self, gang: Gang, seen: ObservedGang) -> set[str]:
        """The present that have not carried out the newest order."""
        if self._serial != gang.serial:
            self._serial = gang.serial
            self._behind = {node for node in self.present if seen.status(node).order_serial < gang.serial}
        return self._behind

    def by_fabric(self, gang: Gang) -> list[Member]:
        """The members that are present, in the order of the fabric."""
        if not self._by_fabric:
            self._by_fabric = placement.by_fabric([gang.members[node] for node in self.present])
        return self._by_fabric

    def forget_members(self) -> None:
        """Members came or went."""
        self._by_fabric, self.quiet_at = [], 0.0


def silent_neighbours(seat: facts.Seat, status: Status) -> list[str]:
    """Neighbours that have not answered the agent of `seat` for as long as an accusation takes."""
    return [node for node in seat.neighbours if status.heard_s.get(node, 0.0) >= ACCUSE_AFTER_S]


def _leaves(member: Member) -> bool:
    return bool(member.out) and member.alive and not member.released and not member.batch_host


def _put(nodes: set[str], node: str, belongs: bool) -> None:
    if belongs:
        nodes.add(node)
    else:
        nodes.discard(node)
