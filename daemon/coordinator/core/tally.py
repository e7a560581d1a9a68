"""One gang, counted as reports come in: how many ranks run, whose agent is missing, whom to look at.

All of it follows from ledger and sight; it is kept because a gang of a thousand nodes reports a thousand times a step,
and each report must cost what one node's does. Sets of nodes have no order: whoever decides by one sorts it first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core import placement
from muster.daemon.coordinator.core.events import RankState, Status
from muster.daemon.coordinator.core.ledger import Gang, Member
from muster.daemon.coordinator.core.sight import AgentSight

ACCUSE_S = 1.25
"""An agent accuses a neighbour that has been silent for this long."""

_NOTHING = Status()


@dataclass(frozen=True, slots=True)
class RankCount:
    """Ranks of the running generation on one node: reported, with a step finished, exited with 0; did one fail."""

    reported: int = 0
    progressed: int = 0
    done: int = 0
    failed: bool = False

    @staticmethod
    def of(ranks: Iterable[RankState], generation: int) -> "RankCount":
        """Count those of `generation`."""
        mine = [rank for rank in ranks if rank.generation == generation]
        return RankCount(
            len(mine),
            sum(rank.progressed for rank in mine),
            sum(rank.exit_code == 0 for rank in mine),
            any(not rank.running and rank.exit_code for rank in mine),
        )


_NO_RANKS = RankCount()


@dataclass(slots=True)
class Tally:
    """The counts of one gang. `present` are the members that may carry ranks; of these are `here` whose agent is in
    touch and whose node is in service, the other sets name who lacks something. `crashed` carry a rank that failed,
    `watchers` miss a neighbour; `leaving` are out, alive, and not let go yet; `unwritten` write a part of the flush
    under way, `botched` could not."""

    present: set[str] = field(default_factory=set)
    here: set[str] = field(default_factory=set)
    unattached: set[str] = field(default_factory=set)
    unfenced: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    watchers: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)
    botched: set[str] = field(default_factory=set)
    reported: int = 0
    progressed: int = 0
    done: int = 0
    quiet_at: float = 0.0
    """Until then ranks may run on nodes that left in silence; 0: that was not looked at yet."""
    many_until: float = 0.0
    """Until then too many nodes count as silent at once."""
    marked: set[str] = field(default_factory=set)
    """Nodes to be counted anew."""
    seats: dict[str, f.Seat] = field(default_factory=dict)
    writers: frozenset[str] = frozenset()
    _ranks: dict[str, RankCount] = field(default_factory=dict)
    _by_fabric: list[Member] = field(default_factory=list)

    @staticmethod
    def begin(gang: Gang) -> "Tally":
        """The tally of `gang`, with every node still to be counted."""
        seats = {seat.node: seat for seat in (*gang.spares, *gang.seats)}
        writers = frozenset(source.node for source in gang.flush.sources) if gang.flush else frozenset()
        return Tally(marked={*gang.members, *seats, *writers}, seats=seats, writers=writers)

    def recount(self, gang: Gang, node: str, agent: AgentSight | None, fit: bool) -> None:
        """Count `node` anew: its member in `gang`, its `agent`, and whether it is in service (`fit`)."""
        member, status = gang.members.get(node), agent.status if agent else _NOTHING
        attached = agent is not None and agent.attached
        present = member is not None and not member.out
        _put(self.present, node, present)
        _put(self.here, node, present and attached and fit)
        _put(self.unattached, node, present and not attached)
        _put(self.unfenced, node, present and not (attached and status.fenced >= gang.fenced))
        _put(self.unfit, node, present and not fit)
        _put(self.failing, node, present and bool(status.failure))
        _put(self.leaving, node, member is not None and _leaves(member))
        self._count_flush(gang, node, status)
        self._count_seat(gang, node, status, attached)

    def _count_flush(self, gang: Gang, node: str, status: Status) -> None:
        writes = node in self.writers
        over = gang.flush is not None and status.flushed_serial >= gang.flush.serial
        _put(self.unwritten, node, writes and not over)
        _put(self.botched, node, writes and over and bool(status.flush_error))

    def _count_seat(self, gang: Gang, node: str, status: Status, attached: bool) -> None:
        seat, ranks = self.seats.get(node), _NO_RANKS
        if seat is not None and seat.group_rank >= 0:
            ranks = RankCount.of(status.ranks, gang.generation)
        _put(self.crashed, node, ranks.failed)
        _put(self.watchers, node, attached and seat is not None and bool(silent_neighbours(seat, status)))
        before = self._ranks.get(node, _NO_RANKS)
        if ranks != before:
            self._ranks[node] = ranks
            self.reported += ranks.reported - before.reported
            self.progressed += ranks.progressed - before.progressed
            self.done += ranks.done - before.done

    def by_fabric(self, gang: Gang) -> list[Member]:
        """The members that are present, in the order of the fabric."""
        if not self._by_fabric:
            self._by_fabric = placement.by_fabric([gang.members[node] for node in self.present])
        return self._by_fabric

    def forget_members(self) -> None:
        """Members came or went."""
        self._by_fabric, self.quiet_at = [], 0.0


def silent_neighbours(seat: f.Seat, status: Status) -> list[str]:
    """Neighbours that have not answered the agent of `seat` for as long as an accusation takes."""
    return [node for node in seat.neighbours if status.heard_s.get(node, 0.0) >= ACCUSE_S]


def _leaves(member: Member) -> bool:
    return bool(member.out) and member.alive and not member.released and not member.batch_host


def _put(nodes: set[str], node: str, belongs: bool) -> None:
    if belongs:
        nodes.add(node)
    else:
        nodes.discard(node)
