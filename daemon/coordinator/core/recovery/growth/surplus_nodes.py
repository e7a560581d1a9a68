"""Surplus nodes: nodes that came with a job of their own, carry no rank, and are not wanted as spares.

A gang requests several nodes at once, for example a repaired one and one of the shared pool. If both come, one may be
left over. A node is left over, too, if a growth was undone and the next one is far away. The node is given back after a
time: other jobs want it. Nothing is held against it.
"""

from muster.daemon.coordinator.core.recovery.growth import undone_growth
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

KEPT_S = 120.0
"""Seconds for which a node without ranks is kept: what it was requested for may need it at any moment, and a request
that follows at once would cost a job's start."""


def give_back(gang_turn: GangTurn, is_awaited: bool) -> None:
    """Remove the nodes that are left over while the gang trains. `is_awaited`: a node with ranks waits for a spare."""
    gang = gang_turn.gang
    later = undone_growth.grows_later(gang.growth, gang.recovery, gang_turn.now)
    seats = len(gang.roster.seats) if later else gang.spec.nodes
    many = len(gang_turn.index.present) - seats - gang.spec.spares
    trains = gang.phase is Phase.RUNNING and gang.plans.swap is None
    if many <= 0 or not gang.growth.pool or not trains or is_awaited:
        return
    for member in _without_ranks(gang)[:many]:
        agent = gang_turn.observed.agents.get(member.node)
        until = max(gang.phase_at, agent.attached_at if agent is not None else 0.0) + KEPT_S
        if gang_turn.now < until:
            gang_turn.turn.tick_at(until)
            continue
        words = f"{member.node} carries no rank, and the gang has all nodes and spares that it wants"
        gang_turn.turn.record(facts.MemberRemoved(gang.id, member.node, words, alive=True, surplus=True))


def _without_ranks(gang: Gang) -> list[Member]:
    """The members without ranks that came with a job of their own, those of the shared pool first."""
    seated = {seat.node for seat in gang.roster.seats}
    idle = [member for member in gang.roster.present() if member.job != gang.slurm.job and member.node not in seated]
    return sorted(idle, key=lambda member: not gang.is_of_pool(member))
