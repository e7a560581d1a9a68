"""Which further nodes a gang that trains wants, and the requests for them.

A gang wants as many nodes of its own as its job has asked for, spares too. It has fewer after losses: it goes on with
fewer ranks or spares, or has ranks on nodes of the shared pool. Two kinds of requests follow:

- For a *repaired* node: one that this run of the job has lost, and that is in service again. Slurm has taken it out of
  the job, so it comes back with a job of its own, as a node of the pool does, but from the partition of the gang's own
  job.
- For a node of the shared pool, if the gang has fewer ranks than it may have.

No request waits in Slurm's queue for longer than a recovery would wait: a gang that needs a node to go on at all must
not stand behind one that trains. The next request follows later, and each one in vain doubles that time. A repair that
has come since is reason enough to ask at once.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker, failure_rate
from muster.daemon.coordinator.core.recovery import planned_stop
from muster.daemon.coordinator.core.recovery.growth import shared_pool, undone_growth
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedNode
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.node_health import NodeHealth

RETRY_S = 300.0
"""Seconds between two requests of a gang that trains. Training goes on meanwhile, so a later node costs little."""
MOST_DOUBLINGS = 3
"""Requests in vain after which the time between two of them grows no more: 40 minutes."""
WORTH_S = 120.0
"""Seconds of training that must be left before a planned stop: the restart of all ranks costs some of them."""


def request(gang_turn: GangTurn) -> None:
    """Request the nodes that the gang wants, as far as that is due."""
    if not may_change(gang_turn):
        return
    gang, now = gang_turn.gang, gang_turn.now
    spares = len(gang_turn.index.present) - len(gang.roster.seats)
    if undone_growth.grows_later(gang.growth, gang.recovery, now) and spares >= gang.spec.spares:
        gang_turn.turn.tick_at(undone_growth.next_at(gang.growth, gang.recovery))
        return
    retry_at = gang.growth.last_request_at + RETRY_S * 2 ** min(gang.growth.requests_in_vain, MOST_DOUBLINGS)
    is_due = now >= retry_at or not gang.growth.last_request_at
    repaired = [
        member.node
        for member in sorted(gang.roster.members.values(), key=lambda member: member.node)
        if _is_repaired(gang_turn, member)
        and (is_due or gang_turn.turn.state.node(member.node).repaired_at > member.asked_for_at)
    ]
    coming = [one for one in gang.growth.pool.values() if not one.node]
    until = now + gang_turn.turn.limits.pool.wait_s
    asked_for = gang.spec.nodes + gang.spec.spares
    lacking = asked_for - len(gang.own_members()) - sum(bool(one.wanted_node) for one in coming)
    for node in repaired[: max(0, lacking)]:
        shared_pool.request_repaired(gang_turn, node, until)
    lacking = gang.spec.nodes - len(gang.roster.present()) - sum(not one.node for one in gang.growth.pool.values())
    if lacking > 0 and is_due:
        shared_pool.request_in_training(gang_turn, lacking, until)
    if len(gang.own_members()) < asked_for and now < retry_at:
        gang_turn.turn.tick_at(retry_at)


def may_change(gang_turn: GangTurn) -> bool:
    """The gang trains, nothing else is planned for it, and its time and its part of the journal suffice."""
    gang, turn = gang_turn.gang, gang_turn.turn
    if not gang.trains_undisturbed or turn.limits.observe or not gang.newest.has_finished_step:
        return False
    stop_at = planned_stop.due_at(gang.spec, gang.slurm, gang_turn.observed)
    if stop_at is not None and gang_turn.now + WORTH_S > stop_at:
        return False
    return not circuit_breaker.why_no_request(turn.state, gang.account, turn.limits, gang_turn.now)


def lacks_nodes(gang: Gang, present: int) -> bool:
    """The gang of so many members may want a node, or may put ranks on other nodes. For a whole gang without nodes of
    the pool this costs no look at its members."""
    few = len(gang.roster.seats) < gang.spec.nodes or present < gang.spec.nodes + gang.spec.spares
    return few or bool(gang.growth.pool)


def _is_repaired(gang_turn: GangTurn, member: Member) -> bool:
    """This run of the job has lost the member's node, and the node is in service again.

    A node that Slurm still counts to the job can't start another job. A lemon would soon be lost again.
    """
    gang, turn = gang_turn.gang, gang_turn.turn
    if not member.removed or gang.is_of_pool(member) or member.node in gang.slurm.job_nodes or member.failed_check:
        return False
    node = turn.state.node(member.node)
    if node.repaired_at <= member.removed_at and not _is_heard_again(gang_turn.turn.observed.node(member.node), member):
        return False
    if node.health is not NodeHealth.FIT or node.drain is not None:
        return False
    if any(one.wanted_node == node.name for one in gang.growth.pool.values()):
        return False
    if turn.state.owes_for_node(node.name):
        return False
    return not failure_rate.is_lemon(failure_rate.failures(turn.state, node.name, turn.now), turn.limits.lemon_after)


def _is_heard_again(seen: ObservedNode, member: Member) -> bool:
    """The member had fallen silent. Its daemon is heard since, and Slurm has the node in service. No judgement says so:
    a spare that falls silent is not judged while the others train."""
    in_service = seen.in_slurm and not seen.down and seen.drain is None
    return member.fell_silent and in_service and seen.heard_at > member.removed_at
