"""The circuit breaker: limits on what Muster takes out of service by itself, and observe mode.

A wrong row in the policy, or a fault of the network, must not empty a cluster. If a limit is reached, a live node stays
in service whatever its hardware reports, and Slurm is not told about a dead node: Slurm finds out by itself. The gang
goes on without a dead node all the same. A gang that loses node after node is stopped.
"""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang, Member
from muster.daemon.coordinator.core.state.state_tables import NODE_TRANSITIONS, NodeHealth, Phase
from muster.daemon.coordinator.core.state.state_updates import COUNTED_OUT_S, LIMIT_WINDOW_S
from muster.daemon.coordinator.core.state.turn import Turn

DRAIN_PREFIX = "muster: "
"""First words of each reason that Slurm shows of a node."""


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
    counted = reported if reported_by is not None else {}
    taken = sum(turn.now - at < LIMIT_WINDOW_S for at in turn.state.taken_out_at.values())
    taken += sum(turn.now - drain.at < LIMIT_WINDOW_S for drain in counted.values())
    if taken >= limits.nodes_per_hour:
        return f"{taken} nodes were taken out of service within the hour, and no more may be"
    nodes = turn.index.out_of_service - (reported.keys() - counted.keys())
    judged = (turn.state.node(name).judged_at for name in nodes)
    out, known = sum(turn.now - at < COUNTED_OUT_S for at in judged), len(turn.state.nodes)
    if out >= max(limits.nodes_at_least, int(limits.fraction * known)):
        return f"{out} of {known} nodes are out of service, and no more may be"
    return ""


def _too_many_reports(turn: Turn, gang: Gang) -> str:
    """Why no further node may be drained for what agents of `gang` report; empty if one may."""
    recent = [drain for drain in turn.state.reported_drains.values() if turn.now - drain.at < LIMIT_WINDOW_S]
    of_job = sum(drain.gang == gang.id for drain in recent)
    of_user = sum(drain.owner_uid == gang.owner_uid for drain in recent)
    if of_job >= turn.limits.reported_drains_per_hour_of_job:
        return f"{of_job} nodes were drained within the hour for reports of this job's agents, and no more may be"
    if of_user >= turn.limits.reported_drains_per_hour_of_user:
        return f"{of_user} nodes were drained within the hour for reports of this user's agents, and no more may be"
    return ""


def take_out_of_service(turn: Turn, gang: Gang | None, node: str, health: NodeHealth, reason: str) -> None:
    """Set the node's health, and owe Slurm a drain (the node is alive) or DOWN. If a limit withholds the call, record
    that."""
    held, before = reason_to_withhold(turn), turn.state.node(node).health
    if health is before or health in NODE_TRANSITIONS[before]:
        turn.record(facts.NodeJudged(node, health, reason))
    verb: facts.SlurmVerb = "drain" if health is NodeHealth.UNFIT else "down"
    id, job = (gang.id, gang.job) if gang else ("", 0)
    if held:
        turn.record(facts.ActionWithheld(id, node, verb, f"{reason}; {held}"))
    else:
        turn.owe(verb, id, job, f"{DRAIN_PREFIX}{reason}", node=node)


def drain_if_run_has_node(turn: Turn, gang: Gang, member: Member, reason: str) -> None:
    """Owe Slurm a drain of a node about which only agents of its job have reported. Where a limit withholds the call,
    record that.

    The owner of a job can make its agents report anything, and may have given the node back meanwhile. So the drain has
    the condition that this run of the job still has the node. The node is UNFIT only once Slurm has carried it out.
    """
    if held := reason_to_withhold(turn, reported_by=gang):
        turn.record(facts.ActionWithheld(gang.id, member.node, "drain", f"{reason}; {held}"))
    else:
        run = gang.restart_count if member.job == gang.job else 0  # a pool job is never requeued
        turn.owe("drain", gang.id, member.job, f"{DRAIN_PREFIX}{reason}", node=member.node, if_run_has_node=run)


def judge_drained(turn: Turn, owed: facts.SlurmCallOwed) -> None:
    """Slurm has carried out a drain that `drain_if_run_has_node` owed: the node is UNFIT."""
    if NodeHealth.UNFIT in NODE_TRANSITIONS[turn.state.node(owed.node).health]:
        turn.record(facts.NodeJudged(owed.node, NodeHealth.UNFIT, owed.text.removeprefix(DRAIN_PREFIX)))


def too_many_swaps(gang: Gang, now: float, most: int) -> str:
    """Why the gang may not go on with further nodes; empty if it may. Losses in an earlier run of the job do not keep
    this run from its start."""
    if gang.phase is not Phase.RECOVERING or not gang.recoveries[-1].nodes_out:
        return ""
    lost = sum(len(r.nodes_out) for r in gang.recoveries if now - r.detected_at < LIMIT_WINDOW_S)
    if lost <= most:
        return ""
    return f"the job has lost {lost} nodes within the hour, and {most} may be replaced: the job may be what breaks them"
