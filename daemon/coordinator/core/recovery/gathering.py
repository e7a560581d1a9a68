"""From Slurm's start of the job to the gang's: its agents attach, and who of them is waited for."""

from collections.abc import Collection

from muster.daemon.coordinator.core.detection import failure_detector
from muster.daemon.coordinator.core.recovery import completion, gang_end, requeueing
from muster.daemon.coordinator.core.state import facts, placement
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

SPARE_WAIT_S = 30.0
"""How long a complete set of rank nodes waits for its spares before it starts without."""
SRUN_LAUNCH_S = 120.0
"""srun has given up a node that does not answer by then: in 40 s with a MessageTimeout of 10 s, Slurm's default."""
BATCH_TIMEOUT_S = 15.0
"""A batch process asks after its gang every other second, or oftener; it is gone where it has not for so long."""
RUNS_WITHOUT_START = 2
"""After so many runs of a job in a row that never came to a start, a further one is held to mend nothing."""
BATCH_SILENCE_S = 6.0
"""One that lives has asked within so long, if it reaches the coordinator."""
REQUEUE_PAUSE_S = 2.0
"""A gang that was requeued stays so for so long: agents that Slurm has not ended yet are told to leave."""
REPAIR_SEEN_S = 12.0
"""Slurm's nodes are looked at every 5 s, and it may be slow to answer."""
RECHECK_S = 1.0
"""So often it is looked who is silent, while a complete set of nodes waits."""


def look_for_job(gang_turn: GangTurn) -> None:
    """Where Slurm has started the job, its agents are expected from now on, though none may ever come."""
    gang = gang_turn.gang
    if gang_turn.observed.job_running is None:
        return
    restarts, _ = gang_turn.observed.job_running
    if gang.phase is Phase.SUBMITTED:
        begin_gathering(gang_turn, gang.job, max(restarts, gang.restart_count))
    elif restarts <= gang.restart_count:
        return  # it is the run before that Slurm tells of
    elif gang_turn.now < gang.phase_at + REQUEUE_PAUSE_S:
        gang_turn.turn.tick_at(gang.phase_at + REQUEUE_PAUSE_S)
    else:
        begin_gathering(gang_turn, gang.job, restarts)


def begin_gathering(gang_turn: GangTurn, job: int, restarts: int) -> None:
    """Slurm has started the job: its agents may attach."""
    gang, seen = gang_turn.gang, gang_turn.observed
    if (job, restarts) != (gang.job, gang.restart_count):
        gang_turn.turn.record(facts.JobRestarted(gang.id, job, restarts))
        if seen.job_nodes and seen.job_restarts == restarts:
            gang_turn.turn.record(
                facts.JobChanged(gang.id, seen.job_nodes)
            )  # Slurm told of them before anybody attached
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.GATHERING, ""))
    seen.first_attach_at = 0.0


def gather(gang_turn: GangTurn) -> None:
    """Start the gang once all have attached whom it waits for; see that it does not wait in vain."""
    gang, spec = gang_turn.gang, gang_turn.gang.spec
    if gang.stop is not None:
        completion.save_and_leave(gang_turn)
        return
    here = len(gang_turn.index.in_service)
    if gang_turn.observed.job_pending and not here:
        return  # Slurm has gone back on its word, and will start it yet
    since = _since(gang_turn)
    waited = gang_turn.now - since
    if _never_enough(gang_turn):
        requeueing.requeue_or_end(gang_turn, requeueing.too_few_nodes_reason(gang_turn))
    elif here < spec.nodes and gang.runs_without_start < RUNS_WITHOUT_START and _launcher_lost(gang_turn):
        requeueing.requeue_or_end(
            gang_turn, f"{here} of {spec.nodes} nodes are here, and their batch script is heard no more"
        )
    elif here >= _awaited_nodes(gang_turn, waited):
        _call_roll(gang_turn)
    elif waited > spec.gather_timeout_s:
        _give_up(gang_turn)
    else:
        complete = here >= spec.nodes
        gang_turn.turn.tick_at(gang_turn.now + RECHECK_S if complete else since + spec.gather_timeout_s)


def _since(gang_turn: GangTurn) -> float:
    """The nodes have their time from the first of them on, for Slurm may take long to start that one; and after a
    coordinator's restart every agent has to attach anew."""
    _, granted_at = gang_turn.observed.job_running or (0, 0.0)
    return max(
        gang_turn.gang.phase_at, granted_at, gang_turn.observed.first_attach_at, gang_turn.turn.observed.observing_since
    )


def _give_up(gang_turn: GangTurn) -> None:
    """The nodes have had their time. What another start of the job may mend goes back into the queue."""
    gang, dead = gang_turn.gang, requeueing.dead_nodes(gang_turn)
    why = _may_mend(gang_turn, dead)
    if why and gang.spec.requeue and not gang_turn.turn.limits.observe:
        requeueing.requeue(gang_turn, why, dead)
    else:
        gang_end.end_gang(
            gang_turn, Phase.FAILED, gang_end.EXIT_NEVER_GATHERED, _missing(gang, gang_turn.index.in_service)
        )


def _may_mend(gang_turn: GangTurn, dead: list[str]) -> str:
    """What has happened to those who have not come, where they may come next time; else empty."""
    gang = gang_turn.gang
    gone = [member.node for member in gang.present() if not gang_turn.observed.is_attached(member.node)]
    if dead:
        return f"neither agent nor daemon is heard of {', '.join(dead)}"
    if gang.runs_without_start >= RUNS_WITHOUT_START:
        return ""
    if gone:
        return f"the agents on {', '.join(gone)} have ended, and none were started anew"
    heard_at = _batch_heard_at(gang_turn)
    if heard_at is None or gang_turn.now - heard_at > BATCH_SILENCE_S:
        attached, timeout_s = len(gang_turn.index.in_service), gang.spec.gather_timeout_s
        few = f"{attached} of {gang.spec.nodes} nodes attached within {timeout_s:.0f} s"
        return f"{few}, and nothing is heard of the job's batch script"
    return ""


def _awaited_nodes(gang_turn: GangTurn, waited: float) -> int:
    """So many nodes start the gang after `waited` seconds."""
    spec = gang_turn.gang.spec
    if waited > spec.gather_timeout_s and not gang_turn.turn.limits.observe:
        return spec.fewest
    long = SRUN_LAUNCH_S if _srun_waits(gang_turn) else SPARE_WAIT_S
    in_time = waited <= min(long, spec.gather_timeout_s) or not gang_turn.observed.first_attach_at
    return spec.nodes + spec.spares if in_time else spec.nodes


def _srun_waits(gang_turn: GangTurn) -> bool:
    """A node hangs that srun still tries to reach, whatever Slurm makes of the node meanwhile. When srun gives up, it
    ends all agents that it has started. They come back without that node; what had begun meanwhile would be lost."""
    seen, since = gang_turn.observed, gang_turn.gang.phase_at
    if requeueing.dead_nodes(gang_turn):
        seen.dead_node_seen_at = gang_turn.now
    return seen.dead_node_seen_at > since > seen.relaunched_at


def _never_enough(gang_turn: GangTurn) -> bool:
    """Of the job's nodes too few are in service: Slurm, or their hardware, has taken the others."""
    gang, out = gang_turn.gang, gang_turn.turn.index.out_of_service
    nodes = gang.job_nodes
    if not nodes or len(nodes) - len(out) >= gang.spec.fewest:
        return False
    bad, since = [node for node in nodes if node in out], max(gang.phase_at, gang_turn.turn.observed.observing_since)
    if (
        gang_turn.now < since + REPAIR_SEEN_S
    ):  # Slurm starts nothing on a bad node: its repair may not have been seen yet
        bad = [node for node in bad if gang_turn.turn.state.node(node).judged_at >= since]
        gang_turn.turn.tick_at(since + REPAIR_SEEN_S)
    return len(nodes) - len(bad) < gang.spec.fewest


def _launcher_lost(gang_turn: GangTurn) -> bool:
    """The batch script is heard no more, and so srun has died as well: no agent will come that is not on its way."""
    gang, heard_at, host, since = (
        gang_turn.gang,
        _batch_heard_at(gang_turn),
        gang_turn.gang.batch_host,
        _since(gang_turn),
    )
    if not gang.spec.requeue or gang_turn.turn.limits.observe:
        return False  # nothing is gained by an early end
    if heard_at is None and host is None:
        gang_turn.turn.tick_at(gang_turn.now + BATCH_TIMEOUT_S)  # it may not have begun
        return False
    if host is not None and gang_turn.observed.is_attached(host.node):
        silent_at = gang_turn.turn.observed.agent_heard_at(gang.id, host.node) + failure_detector.HEARTBEAT_TIMEOUT_S
        if gang_turn.now < silent_at:  # it has not died with its host, and by itself it would have ended the job
            gang_turn.turn.tick_at(silent_at)
            return False
    batch_lost_at = max(heard_at or 0.0, since) + BATCH_TIMEOUT_S
    last_attach_at = max(gang_turn.observed.last_attach_at, since)
    lost_at = max(batch_lost_at, last_attach_at + SPARE_WAIT_S)
    if gang_turn.now >= lost_at and requeueing.most_silent(gang_turn):
        lost_at = gang_turn.now + BATCH_TIMEOUT_S  # the coordinator may be who is cut off
    gang_turn.turn.tick_at(lost_at)
    return gang_turn.now >= lost_at


def _batch_heard_at(gang_turn: GangTurn) -> float | None:
    """When the batch process of this run of the job was last heard; None: it never was."""
    batch = gang_turn.observed.batch
    return (
        batch.heard_at if batch is not None and batch.is_of(gang_turn.gang.job, gang_turn.gang.restart_count) else None
    )


def _call_roll(gang_turn: GangTurn) -> None:
    """Enough have attached: make sure that no rank of an earlier run is left, and have the store opened."""
    gang, here = gang_turn.gang, [gang_turn.gang.members[node] for node in gang_turn.index.in_service]
    store = placement.first_seats(here, gang.spec.nodes)[0]
    gang_turn.turn.record(facts.GenerationFenced(gang.id, gang.generation, "start", True, store, 0, gang_turn.now))


def _missing(gang: Gang, here: Collection[str]) -> str:
    absent = [n for n in gang.job_nodes if n not in here]
    who = ", ".join(absent) if absent else f"{gang.spec.nodes - len(here)} nodes"
    return (
        f"{len(here)} of {gang.spec.nodes} nodes attached within {gang.spec.gather_timeout_s:.0f} s; missing: {who}. "
        f"{''.join(f'{member.removal_reason}. ' for member in gang.members.values() if member.removed)}"
        "See the job's output file for srun's errors, and whether muster-agent is installed on these nodes"
    )
