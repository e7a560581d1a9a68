"""Requeues: if too few nodes are left, the job goes back into Slurm's queue. Here it is decided which nodes it may not
start on, and until when.

A Prolog or a plug-in that fails on one node drains that node, and Slurm holds the job until somebody releases it. A job
that may be requeued is released without that node. A launch that fails again and again has another cause, and each try
drains a node of the site: then the job stays held, and its user is told how to release it.

A requeued job starts on none of the nodes that were bad in its last run. One that was out of service is admitted again
once Slurm has it in service. One that never was (an agent's error) is admitted after ten minutes: a job may wait for
nodes, but not for nodes that are there. Nodes that the user excluded stay excluded.
"""

from collections.abc import Collection

from muster.daemon.coordinator.core.detection import departure
from muster.daemon.coordinator.core.recovery import flushing, gang_end
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import HEARTBEAT_TIMEOUT_S, ObservedGang, ObservedState
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.exit_codes import EXIT_NO_NODES, EXIT_OBSERVED
from muster.node_health import NodeHealth
from muster.wording import counted, listed

EXCLUSION_S = 600.0
"""Seconds for which a requeued job may not start on a node that is in service but was bad for the job."""

_DRAINED_BY_LAUNCH = ("Prolog error", "batch job complete failure", "SlurmdSpoolDir is full")
"""How the reasons begin with which Slurm drains a node that could not launch a job."""
FAILED_LAUNCHES = 2
"""Releases in a row without a start after which a job that is held is released no more."""


def requeue_or_end(gang_turn: GangTurn, why: str) -> None:
    """Requeue the gang, or end it if it may not be requeued. `why`: the reason, used if no node is known to be bad."""
    gang = gang_turn.gang
    lost = ", ".join(sorted(_nodes_to_exclude(gang_turn)))
    words = unlaunched_reason(gang_turn) or (f"no spare is left for {lost}" if lost else why)
    if gang_turn.turn.limits.observe:
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_OBSERVED, f"observe mode: {words}: the job would be requeued")
        return
    if not gang.spec.requeue:
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_NO_NODES, f"{words}, and the job may not be requeued")
        return
    reason = f"{words}: requeue"
    if gang.phase is Phase.RECOVERING and flushing.start_final_flush(gang_turn, reason, Phase.REQUEUED):
        return
    requeue(gang_turn, reason, dead_nodes(gang_turn))


def unlaunched_nodes(gang: Gang, seen: ObservedGang) -> set[str]:
    """The nodes of this run of the job on which srun could start nothing, although Slurm has them in service, or
    nothing that became an agent. A Prolog hangs there, or a TaskProlog fails, for example. On the node of srun itself,
    the fault is another one, and each node may share it. Once the gang has gathered without them, they explain
    nothing."""
    if seen.batch is None or not seen.batch.is_of(gang.slurm.job, gang.slurm.restart_count):
        return set()
    nodes = {*seen.batch.unlaunched, *_without_agent(gang, seen)}
    if gang.phase is not Phase.GATHERING or seen.batch_host in nodes:
        return set()
    return nodes & set(gang.slurm.job_nodes)


def _without_agent(gang: Gang, seen: ObservedGang) -> dict[str, int]:
    """The nodes at whose own fault a task has failed that was to become an agent, and its exit code. Until the batch
    host has an agent, all nodes may share the fault. What a user's own script launches may fail for a reason of its
    own."""
    return {} if gang.spec.own_nodes or gang.roster.batch_host is None else failed_tasks(gang, seen)


def failed_tasks(gang: Gang, seen: ObservedGang) -> dict[str, int]:
    """The nodes of this run of the job on which a task of srun has failed before it joined the gang, and its exit
    code."""
    batch, nodes = seen.batch, set(gang.slurm.job_nodes) - gang.roster.members.keys()
    if batch is None or not batch.is_of(gang.slurm.job, gang.slurm.restart_count):
        return {}
    return {node: code for node, code in batch.failed if node in nodes}


def unlaunched_reason(gang_turn: GangTurn) -> str:
    """Why an agent on these nodes is missing, in words; empty: there are no such nodes."""
    nodes = unlaunched_nodes(gang_turn.gang, gang_turn.observed)
    if not nodes:
        return ""
    names = listed(sorted(nodes))
    failed = _without_agent(gang_turn.gang, gang_turn.observed)
    if node := min(nodes & failed.keys(), default=""):
        why = f"slurm-{gang_turn.gang.slurm.job}.out says why, a TaskProlog for example"
        return f"no agent could start on {names} (exit code {failed[node]}): {why}"
    if all(_is_daemon_silent(gang_turn.turn, node) for node in nodes):
        return f"srun could start nothing on {names}, where the node daemon is silent, too"
    return f"srun could start nothing on {names}, where a Prolog may hang: slurmd's log there says more"


def too_few_nodes_reason(roster: Roster, job: SlurmJob) -> str:
    """Why there are too few nodes, in words."""
    gone = [member for member in roster.members.values() if member.removed]
    if not gone:
        return f"{counted(len(job.job_nodes), 'node is', 'nodes are')} left in the job"
    words = f"{len(gone)} of {len(roster.members)} agents are gone ({gone[0].removal_reason})"
    if len(gone) == len(roster.members) and all(m.removal_reason == m.agent_ended_reason for m in gone):
        words += f"; slurm-{job.job}.out says why, if Slurm has ended them: for their memory, or by scancel"
    return words


def requeue(gang_turn: GangTurn, reason: str, dead: Collection[str] = (), *, given_back: bool = False) -> None:
    """Have Slurm put the job back into its queue, without nodes that are bad, and without `dead` nodes. `given_back` as
    in PhaseChanged."""
    gang = gang_turn.gang
    bad = _nodes_to_exclude(gang_turn) | (set() if are_most_silent(gang_turn.turn, gang.slurm) else set(dead))
    if not gang_turn.job_requeued:
        exclude = tuple(sorted(bad))
        admit = tuple(node for node in gang.slurm.excluded if node not in bad and _exclusion_is_over(gang_turn, node))
        gang_turn.turn.owe("requeue", gang.id, gang.slurm.job, f"muster: {reason}", exclude=exclude, admit=admit)
    shared_pool.close_all(gang_turn, reason, joined=True)
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.REQUEUED, reason, given_back=given_back))


def _nodes_to_exclude(gang_turn: GangTurn) -> set[str]:
    """Nodes of this run of the job on which the next run may not start. A node in service that left the job, because
    its owner gave it back, is none of them; nor is one that was repaired since, or one of the shared pool that gave way
    to another node."""
    gang, unfit = gang_turn.gang, gang_turn.turn.index.out_of_service
    removed = [
        member
        for member in gang.roster.members.values()
        if member.removed and not member.gave_way and not _is_repaired(gang_turn.turn, member.node, member.removed_at)
    ]
    left = {member.node for member in removed}
    if 2 * len(left - unfit) > len(gang.roster.members):
        left &= unfit  # most agents left nodes without a known fault: the nodes share the cause
    left -= {member.node for member in removed if departure.was_given_back(gang_turn, member)} - unfit
    unlaunched = unlaunched_nodes(gang, gang_turn.observed)
    if 2 * len(unlaunched) > len(gang.slurm.job_nodes):
        unlaunched = set()  # likewise
    return left | (set(gang.slurm.job_nodes) & unfit) | unlaunched


def dead_nodes(gang_turn: GangTurn) -> list[str]:
    """The job's nodes that have not attached, and whose daemon was known before and is silent."""
    return [
        node
        for node in gang_turn.gang.slurm.job_nodes
        if node not in gang_turn.index.in_service and _is_daemon_silent(gang_turn.turn, node)
    ]


def are_most_silent(turn: Turn, job: SlurmJob) -> bool:
    """Most of the job's nodes are silent: they share the cause, or the coordinator's own network is cut."""
    nodes = job.job_nodes
    return 2 * sum(_is_daemon_silent(turn, node) for node in nodes) > len(nodes)


def _is_daemon_silent(turn: Turn, node: str) -> bool:
    if not turn.state.node(node).probe_address:
        return False  # it was never heard
    heard_at = max(turn.observed.observing_since, turn.observed.node(node).heard_at)
    return turn.now - heard_at > HEARTBEAT_TIMEOUT_S


def launch_failed_on(observed: ObservedState, job: SlurmJob) -> list[str]:
    """The nodes of the job that Slurm has drained because a launch failed there. None is known of a job that Slurm has
    put back before anybody looked: Slurm forgets which nodes it had."""
    return [name for name in drained_by_launches(observed) if name in job.job_nodes]


def drained_by_launches(observed: ObservedState) -> list[str]:
    """The nodes that Slurm has drained because the launch of some job failed there."""
    drains = {name: node.drain for name, node in observed.nodes.items() if node.drain}
    return sorted(name for name, drain in drains.items() if drain.reason.startswith(_DRAINED_BY_LAUNCH))


def release_after_failed_launch(gang_turn: GangTurn) -> None:
    """Let a pending job start again that Slurm holds because its launch failed: once for each launch."""
    gang, seen, turn = gang_turn.gang, gang_turn.observed, gang_turn.turn
    if not seen.is_held_after_launch:
        return
    may = gang.spec.requeue and not turn.limits.observe and gang.slurm.runs_without_start < FAILED_LAUNCHES
    if not may or turn.state.owes("requeue", gang.id) or seen.released_at_restarts == seen.job_restarts:
        return
    nodes = launch_failed_on(turn.observed, gang.slurm)
    where = f" on {', '.join(nodes)}" if nodes else ""
    seen.released_at_restarts = seen.job_restarts
    turn.owe(
        "requeue",
        gang.id,
        gang.slurm.job,
        f"muster: the launch of the job failed{where}, and Slurm holds it: release it",
    )


def readmit_nodes(gang_turn: GangTurn) -> None:
    """Let a pending job start again on excluded nodes whose exclusion is over: otherwise it could wait for ever."""
    gang = gang_turn.gang
    excluded = [node for node in gang.slurm.excluded if node not in gang.slurm.admitted]
    back = tuple(node for node in excluded if _exclusion_is_over(gang_turn, node))
    if back:
        gang_turn.turn.owe("admit", gang.id, gang.slurm.job, "muster: in service", admit=back)
    later = [end for node in excluded if (end := exclusion_end(gang, node)) > gang_turn.now]
    if later:
        gang_turn.turn.tick_at(min(later))


def exclusion_end(gang: Gang, node: str) -> float:
    """When (seconds) an excluded node that is in service may be started on again."""
    return _excluded_at(gang, node) + EXCLUSION_S


def _exclusion_is_over(gang_turn: GangTurn, node: str) -> bool:
    """At once on a repaired node, after EXCLUSION_S on a node that never was out of service."""
    if node in gang_turn.turn.index.out_of_service:
        return False
    repaired = _is_repaired(gang_turn.turn, node, _excluded_at(gang_turn.gang, node))
    return repaired or gang_turn.now >= exclusion_end(gang_turn.gang, node)


def _is_repaired(turn: Turn, node: str, since: float) -> bool:
    """It was out of service, and was judged FIT after `since` (seconds)."""
    known = turn.state.node(node)
    return known.health is NodeHealth.FIT and known.judged_at > since


def _excluded_at(gang: Gang, node: str) -> float:
    exclusion = gang.slurm.exclusions.get(node)
    return gang.phase_at if exclusion is None else exclusion.at
