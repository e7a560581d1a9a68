"""Departure: a node leaves a gang when Slurm's job no longer has the node, and the node is in use.

A job's owner may give nodes back, and an operator may take nodes from a job. The node may be another user's a moment
later. So an agent of this gang says nothing about such a node any more: its member is removed, its stream ends, and the
health of the node does not change.

A node that Slurm has DOWN can be no other user's. Slurm may have lost its own connection to the node while the gang
trains on, so the failure detector decides about that node.
"""

from muster.daemon.coordinator.core.detection.fencing import remove_member
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.turn.turn import GangTurn


def remove_departed(gang_turn: GangTurn) -> None:
    """Remove the members whose node Slurm's job no longer has. Their agents are not trusted to acknowledge a fence."""
    gang, turn, held = gang_turn.gang, gang_turn.turn, gang_turn.observed.held_nodes
    if not held:
        return  # Slurm has not answered yet
    if turn.changed_node is None:
        nodes = gang.roster.members.keys() - held.get(gang.slurm.job, frozenset())
    else:
        nodes = gang.roster.members.keys() & {turn.changed_node}  # a report costs the work of its own node
    for member in [gang.roster.members[node] for node in sorted(nodes)]:
        if member.gone or not _job_lacks(gang_turn, member):
            continue
        if member.removed:
            turn.record(facts.MemberRemoved(gang.id, member.node, member.removal_reason, alive=False, left_job=True))
        else:
            remove_member(gang_turn, member, member.departed_reason, alive=False, left_job=True)


def was_given_back(gang_turn: GangTurn, member: Member) -> bool:
    """The member is removed only because its node left Slurm's job: nothing speaks against the node.

    Slurm ends the agent of a node that leaves its job, so the agent's end may be noticed before the departure.
    """
    if member.removal_reason == member.departed_reason:
        return True
    ended = member.removal_reason == member.agent_ended_reason and not member.released
    return ended and _job_lacks(gang_turn, member)


def _job_lacks(gang_turn: GangTurn, member: Member) -> bool:
    """Slurm's job no longer has the node of a member, and Slurm does not have the node DOWN."""
    down = gang_turn.turn.observed.node(member.node).down
    return not down and _has_left(gang_turn.gang.slurm, gang_turn.observed, member)


def _has_left(slurm: SlurmJob, seen: ObservedGang, member: Member) -> bool:
    """Slurm's job no longer has the node of a member, as Slurm says.

    Slurm's answer may be older than the newest run of the job, or may be about a job that ends: such an answer takes no
    node away.
    """
    held = seen.held_nodes.get(member.job)
    if held is None or member.node in held:
        return False
    of_this_run = seen.job_running is not None and seen.job_running[0] == slurm.restart_count
    return member.job != slurm.job or of_this_run
