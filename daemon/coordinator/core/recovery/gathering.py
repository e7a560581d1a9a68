"""Gathering: from Slurm's start of the job to the start of the gang. The agents attach; here it is decided which of
them to wait for, and for how long.

If the batch process and the agent on its host are silent while agents are missing, srun has died with its host, and
nobody would start the missing agents. Slurm may not notice for half an hour, if the host comes back within seconds. So
the job is requeued, but not again after the second run in vain. While the batch process is heard, the gang waits for
its agents until the gather timeout.
"""

from collections.abc import Collection

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.recovery import completion, gang_end, requeueing
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import HEARTBEAT_TIMEOUT_S, ObservedGang
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import communicating_seats
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_NEVER_GATHERED, EXIT_STOPPED
from muster.wording import counted, listed

SPARE_WAIT_S = 30.0
"""Seconds that a complete set of rank nodes waits for spares before it starts without them."""
SRUN_LAUNCH_S = 120.0
"""Seconds within which srun has given up a node that does not answer (40 s with Slurm's default MessageTimeout of 10
s)."""
BATCH_TIMEOUT_S = 15.0
"""Seconds without a heartbeat after which the batch process counts as dead. It sends one every 2 s or more often."""
RUNS_WITHOUT_START = 2
"""Runs of a job in a row without a start after which another run is expected to mend nothing."""
BATCH_SILENCE_S = 6.0
"""Seconds within which a live batch process, if it reaches the coordinator, has sent a heartbeat."""
REQUEUE_PAUSE_S = 2.0
"""Seconds that a gang stays REQUEUED at least. Agents that Slurm has not ended yet are told to leave meanwhile."""
REPAIR_SEEN_S = 12.0
"""Seconds within which the repair of a node is observed: Slurm's nodes are read every 5 s, and Slurm may answer
slowly."""
RECHECK_S = 1.0
"""Seconds between two looks at silent nodes while a complete set of nodes waits."""


def look_for_job(gang_turn: GangTurn) -> None:
    """If Slurm has started the job, expect its agents from now on, even if none ever comes. A user's own script may do
    other things for as long as it likes, before its first agent comes."""
    gang = gang_turn.gang
    if gang_turn.observed.job_running is None or gang.spec.awaits_launch:
        return
    restarts, _ = gang_turn.observed.job_running
    if gang.phase is Phase.SUBMITTED:
        begin_gathering(gang_turn, gang.slurm.job, max(restarts, gang.slurm.restart_count))
    elif restarts <= gang.slurm.restart_count:
        return  # Slurm reports the earlier run
    elif gang_turn.now < gang.phase_at + REQUEUE_PAUSE_S:
        gang_turn.turn.tick_at(gang.phase_at + REQUEUE_PAUSE_S)
    else:
        begin_gathering(gang_turn, gang.slurm.job, restarts)


def begin_gathering(gang_turn: GangTurn, job: int, restarts: int) -> None:
    """Slurm has started the job: its agents may attach."""
    gang, seen = gang_turn.gang, gang_turn.observed
    if (job, restarts) != (gang.slurm.job, gang.slurm.restart_count):
        gang_turn.turn.record(facts.JobRestarted(gang.id, job, restarts))
        if seen.job_nodes and seen.job_restarts == restarts:
            gang_turn.turn.record(
                facts.JobChanged(gang.id, seen.job_nodes)
            )  # Slurm reported the nodes before any agent attached
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.GATHERING, ""))
    seen.first_attach_at = 0.0


def gather(gang_turn: GangTurn) -> None:
    """Start the gang once all awaited agents are attached. Requeue or end a gang that waits in vain."""
    gang, spec = gang_turn.gang, gang_turn.gang.spec
    if gang.plans.stop is not None:
        completion.save_and_leave(gang_turn)
        return
    if words := circuit_breaker.reason_to_stop(gang_turn):
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_STOPPED, words)
        return
    here = len(gang_turn.index.in_service)
    if gang_turn.observed.job_pending and not here:
        return  # Slurm has put the job back, and will start it again
    if _launch_failed(gang_turn) or _launcher_failed(gang_turn):
        return
    since = _waiting_since(gang.phase_at, gang_turn.observed, gang_turn.turn.observed.observing_since)
    waited = gang_turn.now - since
    if _never_enough(gang_turn):
        requeueing.requeue_or_end(gang_turn, requeueing.too_few_nodes_reason(gang.roster, gang.slurm))
    elif here < spec.nodes and gang.slurm.runs_without_start < RUNS_WITHOUT_START and _launcher_lost(gang_turn):
        requeueing.requeue_or_end(
            gang_turn, f"{here} of {spec.nodes} agents are attached, and the batch process of the job is silent"
        )
    elif here >= _awaited_nodes(gang_turn, waited):
        _start_preflight(gang_turn)
    elif waited > spec.gather_timeout_s:
        _give_up(gang_turn)
    else:
        complete = here >= spec.nodes
        gang_turn.turn.tick_at(gang_turn.now + RECHECK_S if complete else since + spec.gather_timeout_s)


def _launch_failed(gang_turn: GangTurn) -> bool:
    """Requeue or end the gang if srun could start nothing on so many nodes that too few are left. True: it did."""
    gang, words = gang_turn.gang, requeueing.unlaunched_reason(gang_turn)
    left = len(gang.slurm.job_nodes) - len(requeueing.unlaunched_nodes(gang, gang_turn.observed))
    if not words or left >= gang.spec.fewest:
        return False
    if gang.slurm.runs_without_start < RUNS_WITHOUT_START:
        requeueing.requeue_or_end(gang_turn, words)
    else:
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_NEVER_GATHERED, words)
    return True


def _launcher_failed(gang_turn: GangTurn) -> bool:
    """End the gang of a user's own script if what the script launches has failed, before it joined the gang, on so many
    nodes that too few are left. True: it did."""
    gang = gang_turn.gang
    failed = requeueing.failed_tasks(gang, gang_turn.observed) if gang.spec.own_nodes else {}
    if not failed or len(gang.slurm.job_nodes) - len(failed) >= gang.spec.fewest:
        return False
    node, code = next(iter(failed.items()))
    words = f"the launch has failed before its ranks started: on {listed(failed)}, with exit code {code} on {node}"
    gang_end.end_gang(gang_turn, Phase.FAILED, code, words)
    return True


def _waiting_since(phase_at: float, seen: ObservedGang, observing_since: float) -> float:
    """When the wait for agents began (seconds): when Slurm granted the nodes, which may still boot, and anew with the
    first agent. After a coordinator's restart every agent must attach again."""
    _, granted_at = seen.job_running or (0, 0.0)
    return max(phase_at, granted_at, seen.first_attach_at, observing_since)


def _give_up(gang_turn: GangTurn) -> None:
    """The timeout has passed. Requeue the job if another start may help, else end the gang."""
    gang, dead = gang_turn.gang, requeueing.dead_nodes(gang_turn)
    why = _requeue_reason(gang_turn, dead)
    if why and gang.spec.requeue and not gang_turn.turn.limits.observe:
        requeueing.requeue(gang_turn, why, dead)
    else:
        gang_end.end_gang(
            gang_turn,
            Phase.FAILED,
            EXIT_NEVER_GATHERED,
            _missing_nodes_reason(gang, gang_turn.index.in_service),
        )


def _requeue_reason(gang_turn: GangTurn, dead: list[str]) -> str:
    """Why the missing agents may come at the next start of the job; empty if another start would not help."""
    gang = gang_turn.gang
    gone = [member.node for member in gang.roster.present() if not gang_turn.observed.is_attached(member.node)]
    if dead:
        return f"neither an agent nor a node daemon was heard on {', '.join(dead)}"
    if gang.slurm.runs_without_start >= RUNS_WITHOUT_START:
        return ""
    if gone:
        return f"the agents on {', '.join(gone)} have ended, and were not started again"
    if not _is_batch_heard(gang.slurm, gang_turn.observed, gang_turn.now):
        attached, timeout_s = len(gang_turn.index.in_service), gang.spec.gather_timeout_s
        few = f"{attached} of {gang.spec.nodes} nodes attached within {timeout_s:.0f} s"
        return f"{few}, and nothing was heard from the batch process of the job"
    return ""


def _awaited_nodes(gang_turn: GangTurn, waited: float) -> int:
    """Number of nodes that start the gang after `waited` seconds, without members that were removed because the job
    can't run there."""
    spec = gang_turn.gang.spec
    if waited > spec.gather_timeout_s and not gang_turn.turn.limits.observe:
        return spec.fewest
    long = SRUN_LAUNCH_S if _srun_waits(gang_turn) else SPARE_WAIT_S
    in_time = waited <= min(long, spec.gather_timeout_s) or not gang_turn.observed.first_attach_at
    if not in_time:
        return spec.nodes
    return max(spec.nodes, spec.nodes + spec.spares - len(gang_turn.index.lacking))


def _srun_waits(gang_turn: GangTurn) -> bool:
    """srun still tries to reach a node: a dead one, whatever Slurm makes of it, or one whose Prolog hangs.

    When srun gives up, it ends all agents that it has started. They are launched again without the dead node. A
    generation that had started meanwhile would be lost.
    """
    seen, since = gang_turn.observed, gang_turn.gang.phase_at
    if _first_node_lost(gang_turn):
        return False  # srun has died there, and ends nobody
    given_up = requeueing.unlaunched_nodes(gang_turn.gang, seen)
    if given_up and not _unheard_nodes(gang_turn.gang, seen):
        return False  # srun was launched again without them, perhaps before the first agent had attached
    if requeueing.dead_nodes(gang_turn) or _launch_hangs(gang_turn.gang, seen, gang_turn.now):
        seen.dead_node_seen_at = gang_turn.now
    return seen.dead_node_seen_at > since > seen.relaunched_at


def _launch_hangs(gang: Gang, seen: ObservedGang, now: float) -> bool:
    """srun lives, no agent of a node has attached in this run, and srun has not given that node up."""
    return _is_batch_heard(gang.slurm, seen, now) and bool(_unheard_nodes(gang, seen))


def _unheard_nodes(gang: Gang, seen: ObservedGang) -> set[str]:
    return set(gang.slurm.job_nodes) - set(gang.roster.members) - requeueing.unlaunched_nodes(gang, seen)


def _never_enough(gang_turn: GangTurn) -> bool:
    """Too few of the job's nodes are in service: Slurm, or a hardware fault, has taken the others."""
    gang, out = gang_turn.gang, gang_turn.turn.index.out_of_service
    nodes = gang.slurm.job_nodes
    if not nodes or len(nodes) - len(out) >= gang.spec.fewest:
        return False
    bad, since = [node for node in nodes if node in out], max(gang.phase_at, gang_turn.turn.observed.observing_since)
    if gang_turn.now < since + REPAIR_SEEN_S:  # Slurm starts jobs only on good nodes: a repair may not be observed yet
        bad = [node for node in bad if gang_turn.turn.state.node(node).judged_at >= since]
        gang_turn.turn.tick_at(since + REPAIR_SEEN_S)
    return len(nodes) - len(bad) < gang.spec.fewest


def _launcher_lost(gang_turn: GangTurn) -> bool:
    """The batch process is silent, so srun has died with it: no further agent will be launched."""
    gang, seen, host = gang_turn.gang, gang_turn.observed, gang_turn.gang.roster.batch_host
    heard_at = _batch_heard_at(gang.slurm, seen)
    since = _waiting_since(gang.phase_at, seen, gang_turn.turn.observed.observing_since)
    if not gang.spec.requeue or gang_turn.turn.limits.observe:
        return False  # an early end gains nothing
    if heard_at is None and host is None and not _first_node_lost(gang_turn):
        gang_turn.turn.tick_at(gang_turn.now + BATCH_TIMEOUT_S)  # the batch process may not have started yet
        return False
    if host is not None and seen.is_attached(host.node):
        silent_at = gang_turn.turn.observed.agent_heard_at(gang.id, host.node) + HEARTBEAT_TIMEOUT_S
        if gang_turn.now < silent_at:  # its host lives, and a batch process that ends by itself ends the job
            gang_turn.turn.tick_at(silent_at)
            return False
    batch_lost_at = max(heard_at or 0.0, since) + BATCH_TIMEOUT_S
    last_attach_at = max(seen.last_attach_at, since)
    lost_at = max(batch_lost_at, last_attach_at + SPARE_WAIT_S)
    if gang_turn.now >= lost_at and requeueing.are_most_silent(gang_turn.turn, gang.slurm):
        lost_at = gang_turn.now + BATCH_TIMEOUT_S  # the coordinator may be cut off itself
    gang_turn.turn.tick_at(lost_at)
    return gang_turn.now >= lost_at


def _first_node_lost(gang_turn: GangTurn) -> bool:
    """The node of the batch script is gone, and no agent of it is here: Slurm has taken it out of the job, or its
    daemon is silent."""
    seen = gang_turn.observed
    of_this_run = seen.batch_host and seen.job_restarts == gang_turn.gang.slurm.restart_count
    if not of_this_run or seen.is_attached(seen.batch_host):
        return False
    return seen.batch_host not in seen.job_nodes or seen.batch_host in requeueing.dead_nodes(gang_turn)


def _is_batch_heard(job: SlurmJob, seen: ObservedGang, now: float) -> bool:
    """The batch process of this run of the job lives: it was heard just now."""
    heard_at = _batch_heard_at(job, seen)
    return heard_at is not None and now - heard_at <= BATCH_SILENCE_S


def _batch_heard_at(job: SlurmJob, seen: ObservedGang) -> float | None:
    """When the batch process of this run of the job was last heard; None: it never was."""
    batch = seen.batch
    return batch.heard_at if batch is not None and batch.is_of(job.job, job.restart_count) else None


def _start_preflight(gang_turn: GangTurn) -> None:
    """Enough agents are attached: make sure that no rank of an earlier run is left, and have the store opened."""
    gang, here, spec = gang_turn.gang, gang_turn.index.in_service, gang_turn.gang.spec
    groups = communicating_seats(spec)
    seats = placement.first_seats(
        gang_turn.fabric, here, spec.nodes, groups=groups, apart=spec.spread_spares, own=gang_turn.own_nodes
    )
    store = seats[0]
    gang_turn.turn.record(
        facts.GenerationFenced(gang.id, gang.newest.generation, facts.PREFLIGHT_CAUSE, True, store, 0, gang_turn.now)
    )


def _missing_nodes_reason(gang: Gang, here: Collection[str]) -> str:
    absent = [n for n in gang.slurm.job_nodes if n not in here]
    who = listed(absent, ", ") if absent else counted(gang.spec.nodes - len(here), "node")
    return (
        f"{len(here)} of {gang.spec.nodes} nodes attached within {gang.spec.gather_timeout_s:.0f} s; missing: {who}. "
        f"{''.join(f'{member.removal_reason}. ' for member in gang.roster.members.values() if member.removed)}"
        "See the job's output file for srun's errors, and whether muster-agent is installed on these nodes"
    )
