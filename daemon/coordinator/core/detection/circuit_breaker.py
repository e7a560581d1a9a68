"""The circuit breaker: limits on what Muster takes out of service by itself, limits on what a job may cause, and
observe mode.

A wrong row in the policy, or a fault of the network, must not empty a cluster. If a limit is reached, a live node stays
in service whatever its hardware reports, and Slurm is not told about a dead node: Slurm finds out by itself. The gang
goes on without a dead node all the same. A gang that loses node after node is stopped.

The journal keeps every record, and the owner of a job can cause as many as they like. So a gang that has used up its
part of the journal, or its owner's part, is stopped at its next recovery. Requests of users may use half of a part.
Whoever asks for more is told when to ask again, and requests stop no gang.
"""

from math import ceil

from muster.daemon.coordinator.core.detection import drain_reason, failure_rate
from muster.daemon.coordinator.core.detection.drain_reason import DrainReason, DrainSource
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.account import Account, JournalUse
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import RecoveryState
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.roster import Member, Roster
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import COUNTED_OUT_S, LIMIT_WINDOW_S
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.node_health import NODE_TRANSITIONS, OUT_OF_SERVICE, UNRESPONSIVE, NodeHealth
from muster.wording import counted, listed

MIB = 1024 * 1024
SPARED_MIB = 1.0
"""MiB of its own records, some 20 recoveries, below which a gang goes on whatever other gangs of its user have used."""
REQUESTS_PART = 0.5
"""The part of what the journal may hold of a gang, or of a user, that requests of users may use."""


def reason_to_withhold(turn: Turn, reported_by: Gang | None = None) -> str:
    """Why no further node may be taken out of service; empty if one may.

    `reported_by`: the gang whose agents alone have reported about the node; None: there is other evidence. Nodes that
    agents have reported count against the limits of their job and its owner, and leave the site's limits to evidence of
    other kinds. The site's limits hold for them last.
    """
    limits, reported = turn.limits, turn.state.reported_drains
    if limits.observe:
        return "observe mode"
    if reported_by is not None and (words := _too_many_reports(turn, reported_by)):
        return words
    counts = reported if reported_by is not None else {}
    taken = sum(turn.now - at < LIMIT_WINDOW_S for at in turn.state.taken_out_at.values())
    taken += sum(turn.now - drain.at < LIMIT_WINDOW_S for drain in counts.values())
    if taken >= limits.nodes_per_hour:
        return f"{counted(taken, 'node was', 'nodes were')} taken out of service within the hour, and no more may be"
    nodes = turn.index.out_of_service - (reported.keys() - counts.keys())
    judged = (turn.state.node(name).judged_at for name in nodes)
    out, known = sum(turn.now - at < COUNTED_OUT_S for at in judged), len(turn.state.nodes)
    if out >= max(limits.nodes_at_least, int(limits.fraction * known)):
        return f"{out} of {known} nodes are out of service, and no more may be"
    return ""


def _too_many_reports(turn: Turn, gang: Gang) -> str:
    """Why no further node may be drained for what agents of `gang` report; empty if one may."""
    recent = [drain for drain in turn.state.reported_drains.values() if turn.now - drain.at < LIMIT_WINDOW_S]
    of_job = sum(drain.gang == gang.id for drain in recent)
    of_user = sum(drain.owner_uid == gang.account.owner_uid for drain in recent)
    if of_job >= turn.limits.reported_drains_per_hour_of_job:
        return f"{_drained(of_job)} for reports of this job's agents, and no more may be"
    if of_user >= turn.limits.reported_drains_per_hour_of_user:
        return f"{_drained(of_user)} for reports of this user's agents, and no more may be"
    return ""


def _drained(nodes: int) -> str:
    return f"{counted(nodes, 'node was', 'nodes were')} drained within the hour"


def take_out_of_service(
    turn: Turn,
    gang: Gang | None,
    node: str,
    health: NodeHealth,
    reason: str,
    source: DrainSource = DrainSource.NODE,
    program_error: str = "",
) -> None:
    """Set the node's health, and owe Slurm a drain (the node is alive) or DOWN. If a limit withholds the call, record
    that. `source`: on whose word. `program_error`: as in NodeSignalled."""
    held, before = reason_to_withhold(turn), turn.state.node(node).health
    if health is before or health in NODE_TRANSITIONS[before]:
        counts = source is DrainSource.NODE and before not in OUT_OF_SERVICE
        failure = failure_rate.failures(turn.state, node, turn.now) + 1 if counts else 0
        lemon = failure_rate.is_lemon(failure, turn.limits.lemon_after)
        judged = facts.NodeJudged(node, health, reason, failure=failure, lemon=lemon, program_error=program_error)
        turn.record(judged)
    verb: facts.SlurmVerb = "down" if health in UNRESPONSIVE else "drain"
    id, job = (gang.id, gang.slurm.job) if gang else ("", 0)
    if held:
        turn.record(facts.ActionWithheld(id, node, verb, f"{reason}; {held}"))
    else:
        text, resumable = str(DrainReason(reason, source)), _may_be_resumed(turn, node)
        turn.owe(verb, id, job, text, node=node, resumable=resumable)


def drain_if_run_has_node(turn: Turn, gang: Gang, member: Member, reason: str) -> None:
    """Owe Slurm a drain of a node about which only agents of its job have reported. Where a limit withholds the call,
    record that.

    The owner of a job can make its agents report anything, and may have given the node back meanwhile. So the drain has
    the condition that this run of the job still has the node. The node is UNFIT only once Slurm has carried it out.
    """
    if held := reason_to_withhold(turn, reported_by=gang):
        turn.record(facts.ActionWithheld(gang.id, member.node, "drain", f"{reason}; {held}"))
    else:
        run = gang.slurm.restart_count if member.job == gang.slurm.job else 0  # a pool job is never requeued
        text, resumable = str(DrainReason(reason)), _may_be_resumed(turn, member.node)
        turn.owe("drain", gang.id, member.job, text, node=member.node, if_run_has_node=run, resumable=resumable)


def _may_be_resumed(turn: Turn, name: str) -> bool:
    """The site lets Muster resume nodes, and nobody else has drained this one: Muster's reason replaces theirs."""
    seen = turn.observed.node(name)
    if not turn.limits.resume_after_check or not seen.in_slurm:
        return False
    return seen.drain is None or drain_reason.is_same(seen.drain.reason, turn.state.node(name).drained_as)


def judge_drained(turn: Turn, owed: facts.SlurmCallOwed) -> None:
    """Slurm has carried out a drain that `drain_if_run_has_node` owed: the node is UNFIT."""
    if NodeHealth.UNFIT in NODE_TRANSITIONS[turn.state.node(owed.node).health]:
        reason = drain_reason.parse(owed.text)
        turn.record(facts.NodeJudged(owed.node, NodeHealth.UNFIT, reason.words if reason else owed.text))


def reason_to_stop(gang_turn: GangTurn) -> str:
    """Why the gang is stopped for good instead of recovered; empty if it is not."""
    gang, limits, now = gang_turn.gang, gang_turn.turn.limits, gang_turn.now
    lost = ""
    if gang.phase is Phase.RECOVERING:
        lost = too_many_swaps(gang.recovery, limits, now) or _breaks_nodes(gang.roster, now)
    return lost or too_many_records(gang_turn.turn.state, gang.account, limits, now)


def _breaks_nodes(roster: Roster, now: float) -> str:
    """Why the gang may have no further node: the same error of its program has cost this run two within the hour; empty
    if none has."""
    nodes_of: dict[str, list[str]] = {}
    for member in roster.members.values():
        if member.program_error and now - member.removed_at < LIMIT_WINDOW_S:
            nodes_of.setdefault(member.program_error, []).append(member.node)
    for error, nodes in sorted(nodes_of.items()):
        if len(nodes) > 1:
            words = f"{listed(sorted(nodes), ', ')} each had to be taken out of service after {error}"
            return f"{words}, an error of the program: the script is the likely cause, and gets no further node"
    return ""


def too_many_swaps(recovery: RecoveryState, limits: Limits, now: float) -> str:
    """Why a gang that recovers may not go on with further nodes; empty if it may. Losses in an earlier run of the job
    do not keep this run from its start."""
    if not recovery.recoveries[-1].nodes_out:
        return ""
    lost, most = _nodes_lost(recovery, now), limits.swaps_per_hour
    if lost <= most:
        return ""
    words = f"the job has lost {counted(lost, 'node')} within the hour, and {most} may be replaced"
    return f"{words}: the job may be what breaks them"


def swaps_left(turn: Turn, recovery: RecoveryState) -> int:
    """How many nodes the gang may still leave within this hour."""
    return turn.limits.swaps_per_hour - _nodes_lost(recovery, turn.now)


def _nodes_lost(recovery: RecoveryState, now: float) -> int:
    """Nodes that the gang has lost within the hour. Nodes left on request, or to undo a growth, show no fault."""
    recent = (one for one in recovery.recoveries if now - one.detected_at < LIMIT_WINDOW_S)
    return sum(len(one.nodes_out) - len(one.nodes_requested) - len(one.nodes_undone) for one in recent)


def too_many_records(state: DurableState, account: Account, limits: Limits, now: float) -> str:
    """Why the gang may not go on and cause further records of the journal; empty if it may."""
    of_user = state.journal_use.get(account.owner_uid, JournalUse()).counted_at(now) / MIB
    of_job = account.journal_use.counted_at(now) / MIB
    if of_job > limits.journal_mib_per_job:
        return f"the job was recovered too often: {_use_of_job(of_job, limits)}"
    if of_user > limits.journal_mib_per_user and of_job > SPARED_MIB:
        return f"{_use_of_user(account.owner_uid, of_user, limits)}, and {of_job:.2f} MiB of them are of this job"
    return ""


def why_no_request(state: DurableState, account: Account, limits: Limits, now: float) -> str:
    """Why users may request nothing of the gang that adds records to the journal, and when they may; empty if they may
    now."""
    uid, of_job = account.owner_uid, account.journal_use
    of_user = state.journal_use.get(uid, JournalUse())
    most_of_job, most_of_user = limits.journal_mib_per_job * MIB, limits.journal_mib_per_user * MIB
    wait_s, words = max(
        (of_job.wait_s(REQUESTS_PART * most_of_job, now), _use_of_job(of_job.counted_at(now) / MIB, limits)),
        (of_user.wait_s(REQUESTS_PART * most_of_user, now), _use_of_user(uid, of_user.counted_at(now) / MIB, limits)),
    )
    return f"{words}. Requests may use half of that: try again in {ceil(wait_s)} s" if wait_s else ""


def _use_of_job(mib: float, limits: Limits) -> str:
    most = f"{limits.journal_mib_per_job:g} MiB are allowed (journal_mib_per_job)"
    return f"the records of this job count {mib:.2f} MiB in the journal, and {most}"


def _use_of_user(uid: int, mib: float, limits: Limits) -> str:
    most = f"{limits.journal_mib_per_user:g} MiB are allowed (journal_mib_per_user)"
    return f"the records of all jobs of uid {uid} count {mib:.2f} MiB in the journal, and {most}"
