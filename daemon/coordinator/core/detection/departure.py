"""Departure: a node leaves a gang when Slurm's job no longer has the node, and the node is in use.

A job's owner may give nodes back, and an operator may take nodes from a job. The node may be another user's a moment
later. So an agent of this gang says nothing about such a node any more: its member is removed, its stream ends, and the
health of the node does not change.

A node that Slurm has DOWN can be no other user's. Slurm may have lost its own connection to the node while the gang
trains on, so the failure detector decides about that node.
"""

from muster.daemon.coordinator.core.detection.failure_detector import remove_member
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.turn import GangTurn


def remove_departed(gang_turn: GangTurn) -> None:
    """Remove the members whose node Slurm's job no longer has. Their agents are not trusted to acknowledge a fence."""
    gang, turn = gang_turn.gang, gang_turn.turn
    departed = _departed(gang, turn.observed)
    for node in sorted(departed if turn.changed_node is None else departed & {turn.changed_node}):
        member = gang.members[node]
        if member.removed:
            turn.record(facts.MemberRemoved(gang.id, node, member.removal_reason, alive=False, left_job=True))
        else:
            remove_member(gang_turn, member, f"job {member.job} no longer has {node}", alive=False, left_job=True)


def _departed(gang: Gang, observed: ObservedState) -> set[str]:
    """Nodes of members that are not gone, that Slurm's job no longer has, and that Slurm does not have DOWN.

    Slurm's answer may be older than the newest run of the job, or may be about a job that ends: such an answer takes no
    node away.
    """
    seen = observed.gang(gang.id)
    nodes_of_job = seen.pool_job_nodes
    if seen.job_running is not None and seen.job_running[0] == gang.restart_count:
        nodes_of_job = {**nodes_of_job, gang.job: seen.job_nodes}
    candidates = gang.members.keys() - set(nodes_of_job.get(gang.job, ())) if nodes_of_job else ()
    members = (gang.members[node] for node in candidates)
    left = {m.node for m in members if not m.gone and m.node not in nodes_of_job.get(m.job, (m.node,))}
    return {node for node in left if not observed.node(node).down}
