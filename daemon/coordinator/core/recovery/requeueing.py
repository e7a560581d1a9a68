"""Requeues: if too few nodes are left, the job goes back into Slurm's queue. Here it is decided which nodes it may not
start on, and until when."""

from collections.abc import Collection

from muster.daemon.coordinator.core.detection import departure
from muster.daemon.coordinator.core.recovery import flushing, gang_end, shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.observed_state import HEARTBEAT_TIMEOUT_S
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

EXCLUSION_S = 600.0
"""Seconds for which a requeued job may not start on a node that is in service but was bad for the job."""


def requeue_or_end(gang_turn: GangTurn, why: str) -> None:
    """Requeue the gang, or end it if it may not be requeued. `why`: the reason, used if no node is known to be bad."""
    gang = gang_turn.gang
    lost = ", ".join(sorted(_nodes_to_exclude(gang_turn)))
    words = f"no spare is left for {lost}" if lost else why
    if gang_turn.turn.limits.observe:
        gang_end.end_gang(
            gang_turn, Phase.FAILED, gang_end.EXIT_OBSERVED, f"observe mode: {words}: the job would be requeued"
        )
        return
    if not gang.spec.requeue:
        gang_end.end_gang(gang_turn, Phase.FAILED, gang_end.EXIT_NO_NODES, f"{words}, and the job may not be requeued")
        return
    reason = f"{words}: requeue"
    if gang.phase is Phase.RECOVERING and flushing.start_final_flush(gang_turn, reason, Phase.REQUEUED):
        return
    requeue(gang_turn, reason, dead_nodes(gang_turn))


def too_few_nodes_reason(gang_turn: GangTurn) -> str:
    """Why there are too few nodes, in words."""
    gone = [member for member in gang_turn.gang.members.values() if member.removed]
    if not gone:
        return f"{len(gang_turn.gang.job_nodes)} nodes are left in the job"
    return f"{len(gone)} of {len(gang_turn.gang.members)} agents are gone ({gone[0].removal_reason})"


def requeue(gang_turn: GangTurn, reason: str, dead: Collection[str] = ()) -> None:
    """Have Slurm put the job back into its queue, without nodes that are bad, and without `dead` nodes."""
    gang, unfit = gang_turn.gang, gang_turn.turn.index.out_of_service
    bad = _nodes_to_exclude(gang_turn) | (set() if most_silent(gang_turn) else set(dead))
    if not gang_turn.job_requeued:
        exclude = tuple(sorted(bad))
        admit = tuple(node for node in gang.excluded if node not in bad and node not in unfit)
        gang_turn.turn.owe("requeue", gang.id, gang.job, f"muster: {reason}", exclude=exclude, admit=admit)
    shared_pool.close_all(gang_turn, reason, joined=True)
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.REQUEUED, reason))


def _nodes_to_exclude(gang_turn: GangTurn) -> set[str]:
    """Nodes of this run of the job on which the next run may not start. A node in service that left the job, because
    its owner gave it back, is none of them."""
    gang, unfit = gang_turn.gang, gang_turn.turn.index.out_of_service
    removed = [member for member in gang.members.values() if member.removed]
    left = {member.node for member in removed}
    if 2 * len(left - unfit) > len(gang.members):
        left &= unfit  # most agents left nodes without a known fault: the nodes share the cause
    left -= {member.node for member in removed if departure.was_given_back(gang_turn, member)} - unfit
    return left | (set(gang.job_nodes) & unfit)


def dead_nodes(gang_turn: GangTurn) -> list[str]:
    """The job's nodes that have not attached, and whose daemon was known before and is silent."""
    return [
        node
        for node in gang_turn.gang.job_nodes
        if node not in gang_turn.index.in_service and _daemon_is_silent(gang_turn, node)
    ]


def most_silent(gang_turn: GangTurn) -> bool:
    """Most of the job's nodes are silent: they share the cause, or the coordinator's own network is cut."""
    nodes = gang_turn.gang.job_nodes
    return 2 * sum(_daemon_is_silent(gang_turn, node) for node in nodes) > len(nodes)


def _daemon_is_silent(gang_turn: GangTurn, node: str) -> bool:
    known = node in gang_turn.turn.state.nodes and bool(gang_turn.turn.state.node(node).probe_address)
    return (
        known
        and gang_turn.now - max(gang_turn.turn.observed.observing_since, gang_turn.turn.observed.node(node).heard_at)
        > HEARTBEAT_TIMEOUT_S
    )


def readmit_nodes(gang_turn: GangTurn) -> None:
    """Let a pending job start again on excluded nodes: at once on repaired nodes, after EXCLUSION_S on nodes that never
    were out of service. Otherwise the job could wait for ever."""
    gang = gang_turn.gang
    if not gang.excluded:
        return
    waited = gang_turn.now - gang.phase_at
    back = []
    for node in (gang_turn.turn.state.node(name) for name in gang.excluded if name not in gang.admitted):
        in_service = node.name not in gang_turn.turn.index.out_of_service
        repaired = node.health is NodeHealth.FIT and node.judged_at > gang.phase_at
        if in_service and (repaired or waited >= EXCLUSION_S):
            back.append(node.name)
    if back:
        words = "muster: in service"
        gang_turn.turn.owe("admit", gang.id, gang.job, words, admit=tuple(back))
    elif waited < EXCLUSION_S:
        gang_turn.turn.tick_at(gang.phase_at + EXCLUSION_S)
