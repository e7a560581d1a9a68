"""The failure detector: which nodes are suspected, how they are probed, and what follows from the answers.

A node is suspected when a watched peer accuses it, when its agent's stream ends or brings nothing, or when its agent
does not acknowledge a fence. A suspicion leads to a round of probes and to nothing else. Only the result of a round
(`probe_rounds`) removes a node from its gang. A node is LOST or HUNG only if two other agents have found it silent: the
coordinator's own probes are one witness and never enough.
"""

from math import inf

from muster.daemon.coordinator.core.detection import circuit_breaker, fencing, outage, probe_rounds, progress_timeouts
from muster.daemon.coordinator.core.detection.probe_rounds import ProbeResult, evaluate
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S, OUT_OF_TOUCH_S
from muster.daemon.coordinator.core.state.observed_state import (
    HEARTBEAT_TIMEOUT_S,
    NODE_HEARTBEAT_S,
    ObservedNode,
    Probe,
    clear_suspicion,
    stop_suspecting,
)
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED
from muster.daemon.coordinator.core.turn.gang_index import silent_watched_peers
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.node_health import NodeHealth

HUNG_AFTER_S = 4.0
"""Seconds between the first and the last round of probes that only the kernel answered, before a node is HUNG.
Processes of a healthy node that wait for a processor or for memory answer again within seconds."""
MISSED_HEARTBEAT_S = NODE_HEARTBEAT_S + 1.0
"""Seconds after the last heartbeat of a node's daemon until the next one is missed."""
FENCE_ANSWER_S = 0.4
"""Seconds within which a healthy agent acknowledges a fence. After that its node is probed."""
REATTACH_S = 5.0
"""Seconds within which an agent attaches again after its stream broke, or after a restart of the coordinator."""
MUTE_TIMEOUT_S = 10.0
"""Seconds after which an agent that does not answer, while its node's daemon does, loses its place in the gang."""


def examine(gang_turn: GangTurn) -> None:
    """Suspect the nodes that give reason to, act on finished rounds of probes, and start rounds that are due."""
    if gang_turn.gang.phase not in MONITORED:
        return
    fencing.note_known_newcomers(gang_turn)
    if gang_turn.turn.changed_node is not None and _may_be_removed(gang_turn, gang_turn.turn.changed_node):
        gang_turn.turn.changed_node = None  # look at all nodes: how many are silent at once decides
    suspected, changed_node = gang_turn.observed.suspected_since, gang_turn.turn.changed_node
    looked_at = suspected.keys() if changed_node is None else suspected.keys() & {changed_node}
    for gone in looked_at - gang_turn.index.expected:
        stop_suspecting(gang_turn.observed, gone)
    pending = _suspect_unheard(gang_turn) | (_overdue_nodes(gang_turn) if changed_node is None else {changed_node})
    members = [gang_turn.gang.roster.members[node] for node in sorted(pending & gang_turn.index.expected)]
    for member in members:  # suspect all before any result is acted on: how many are silent at once decides
        _suspect_unattached(gang_turn, member)
        _suspect_unfenced(gang_turn, member)
    for member in members:
        if member.node in suspected:
            _act_on_result(gang_turn, member)
        if member.node in suspected:
            probe_rounds.start_if_due(gang_turn, member)


def _may_be_removed(gang_turn: GangTurn, node: str) -> bool:
    """Every witness finds the node silent, and not too many nodes are known to be silent."""
    probe = gang_turn.observed.probes.get(node)
    if probe is None or evaluate(probe, gang_turn.observed.last_step_at) not in (ProbeResult.HUNG, ProbeResult.LOST):
        return False
    most = outage.chance_limit(gang_turn.turn.state, gang_turn.gang.roster)
    return len(gang_turn.observed.suspected_since) <= most


def _overdue_nodes(gang_turn: GangTurn) -> set[str]:
    """Nodes that may have to be probed, whatever the event is about."""
    suspected = gang_turn.observed.suspected_since.keys()
    return gang_turn.index.unattached | suspected | _without_acknowledgement(gang_turn) | _silent_agents(gang_turn)


def _without_acknowledgement(gang_turn: GangTurn) -> set[str]:
    """Nodes that had time to acknowledge the fence, or to open the store, and did not."""
    gang, unfenced = gang_turn.gang, gang_turn.index.unfenced
    if gang.phase not in FENCING or (not unfenced and gang_turn.store_listens()):
        return set()
    due = fencing.phase_observed_since(gang_turn) + FENCE_ANSWER_S
    if gang_turn.now < due:
        gang_turn.turn.tick_at(due)
        return set()
    return {*unfenced, gang.recovery.next_store_node}


def _silent_agents(gang_turn: GangTurn) -> set[str]:
    """Nodes whose agent has an open stream and sends no heartbeat. All agents are looked at only when the first of them
    may be overdue, because a gang may have a thousand."""
    index = gang_turn.index
    overdue = set()
    if gang_turn.now >= index.heartbeat_check_at:
        since = {node: _last_contact_at(gang_turn, node) for node in index.expected - index.unattached}
        overdue = {node for node, at in since.items() if gang_turn.now - at >= HEARTBEAT_TIMEOUT_S}
        index.heartbeat_check_at = (
            min((at for node, at in since.items() if node not in overdue), default=gang_turn.now) + HEARTBEAT_TIMEOUT_S
        )
    gang_turn.turn.tick_at(index.heartbeat_check_at)
    return overdue


def _last_contact_at(gang_turn: GangTurn, node: str) -> float:
    """When an agent with an open stream was last heard, or was last cleared of a suspicion."""
    return max(
        gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, node), gang_turn.observed.cleared_at.get(node, 0.0)
    )


def _suspect_unheard(gang_turn: GangTurn) -> set[str]:
    """Suspect the watched peers whose silence stands in the statuses of agents. So an accusation outlives a restart.

    Returns: the nodes that are suspected for this reason.
    """
    index, changed_node, seen = gang_turn.index, gang_turn.turn.changed_node, gang_turn.observed
    unheard = set()
    for watcher in sorted(index.accusers if changed_node is None else index.accusers & {changed_node}):
        agent = seen.agents[watcher]
        for node in silent_watched_peers(index.seats[watcher], agent.status):
            if node in index.present and agent.reported_at > seen.cleared_at.get(node, 0.0):
                unheard.add(node)
                seen.suspected_since.setdefault(node, agent.reported_at)
    return unheard


def _suspect_unattached(gang_turn: GangTurn, member: Member) -> None:
    """Suspect the member if its agent has had no stream for longer than an agent needs to attach again, or has an open
    stream that brings no heartbeat: a node that loses power closes no stream."""
    agent = gang_turn.observed.agents.get(member.node)
    if agent and agent.attached:
        since, timeout_s = _last_contact_at(gang_turn, member.node), HEARTBEAT_TIMEOUT_S
    else:
        since = max(
            gang_turn.turn.observed.observing_since,
            gang_turn.observed.cleared_at.get(member.node, 0.0),
            agent.gone_at if agent else 0.0,
        )
        timeout_s = REATTACH_S
    if gang_turn.now - since >= timeout_s:
        gang_turn.observed.suspected_since.setdefault(member.node, gang_turn.now)
    else:
        gang_turn.turn.tick_at(since + timeout_s)


def _suspect_unfenced(gang_turn: GangTurn, member: Member) -> None:
    fenced = gang_turn.has_fenced(member.node)
    if gang_turn.gang.phase not in FENCING or (
        fenced and (member.node != gang_turn.gang.recovery.next_store_node or gang_turn.store_listens())
    ):
        return
    asked_at = max(fencing.phase_observed_since(gang_turn), gang_turn.observed.cleared_at.get(member.node, 0.0))
    if fenced:
        # The fence is acknowledged, only the store is missing.
        asked_at = max(asked_at, gang_turn.gang.recovery.store_at)
    if gang_turn.now < asked_at + FENCE_ANSWER_S:
        gang_turn.turn.tick_at(asked_at + FENCE_ANSWER_S)
    else:
        gang_turn.observed.suspected_since.setdefault(member.node, asked_at)
    if not fenced:
        fencing.take_out_if_stuck(gang_turn, member)


def _act_on_result(gang_turn: GangTurn, member: Member) -> None:
    seen, node = gang_turn.observed, member.node
    probe = seen.probes.get(node)
    if probe is None:
        return
    daemon_lives = _daemon_heard(gang_turn.turn.observed.node(node), seen.kernel_only_since.get(node, inf))
    result = evaluate(probe, seen.last_step_at, daemon_lives)
    if result in (ProbeResult.HUNG, ProbeResult.LOST) and not _witnessed(gang_turn, node, probe):
        _remove_if_slurm_has(gang_turn, member)
        return
    if result is ProbeResult.HUNG:
        seen.kernel_only_since.setdefault(node, probe.asked_at)
    elif result is not ProbeResult.OPEN:
        seen.kernel_only_since.pop(node, None)
    may_wait = result in (ProbeResult.HUNG, ProbeResult.AGENT_MUTE)
    if may_wait and progress_timeouts.step_may_be_under_way(gang_turn, node):
        result = ProbeResult.OPEN
    match result:
        case ProbeResult.ALIVE:
            _node_answered(gang_turn, member)
        case ProbeResult.AGENT_ENDED:
            fencing.remove_member(gang_turn, member, member.agent_ended_reason, alive=False)
        case ProbeResult.AGENT_MUTE:
            if gang_turn.now - gang_turn.observed.suspected_since[member.node] > MUTE_TIMEOUT_S:
                fencing.remove_member(gang_turn, member, f"muster-agent on {member.node} does not answer", alive=False)
        case ProbeResult.HUNG if _hangs(gang_turn, member.node, probe):
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_out_unless_many(gang_turn, member, NodeHealth.HUNG, reason)
        case ProbeResult.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_out_unless_many(gang_turn, member, NodeHealth.LOST, reason)
        case ProbeResult.OPEN if _spare_is_silent(gang_turn, node, probe):
            reason = f"{member.node}, which carries no rank, has not answered anybody for {CAUSE_WAIT_S:.0f} s"
            fencing.remove_member(gang_turn, member, reason, alive=False)
        case ProbeResult.HUNG | ProbeResult.OPEN:
            pass


def _daemon_heard(daemon: ObservedNode, kernel_only_since: float) -> bool:
    """The node's daemon was heard since only the kernel answers probes there. Strangers may hold all connections that
    the daemon's port allows, so the daemon's own stream counts more than a probe of that port."""
    return daemon.attached and daemon.heard_at > kernel_only_since


def _hangs(gang_turn: GangTurn, node: str, probe: Probe) -> bool:
    """Only the kernel has answered for HUNG_AFTER_S, and an attached daemon has missed a heartbeat."""
    daemon = gang_turn.turn.observed.node(node)
    if daemon.attached and gang_turn.now < daemon.heard_at + MISSED_HEARTBEAT_S:
        gang_turn.turn.tick_at(daemon.heard_at + MISSED_HEARTBEAT_S)
        return False
    return probe.asked_at - gang_turn.observed.kernel_only_since[node] >= HUNG_AFTER_S


def _spare_is_silent(gang_turn: GangTurn, node: str, probe: Probe) -> bool:
    """A member without a seat has been silent for CAUSE_WAIT_S.

    Steps of the gang prove nothing about such a member. While there are steps its node health does not change.
    But the member is removed, because a recovery would wait for it.
    """
    seat = gang_turn.index.seats.get(node)
    carries = seat is not None and seat.group_rank >= 0
    if carries or gang_turn.now - gang_turn.observed.suspected_since[node] < CAUSE_WAIT_S:
        return False
    result = evaluate(probe, moved_at=0.0)
    return result not in (ProbeResult.ALIVE, ProbeResult.OPEN) and _witnessed(gang_turn, node, probe)


def _witnessed(gang_turn: GangTurn, node: str, probe: Probe) -> bool:
    """Two agents besides the coordinator have found the node silent.

    If the gang has only one other agent, one is enough. If more agents exist but can't be asked, one is enough after
    CAUSE_WAIT_S. The coordinator's own probes are never enough: the link of the coordinator may be what is cut. No word
    is enough if the silent node does not end its ranks by itself.
    """
    if fencing.has_heard_of_none(gang_turn, node):
        return False
    others = len(gang_turn.index.present) - 1
    asked = len(gang_turn.index.present.intersection(probe.witnesses))  # a removed member is no witness
    if asked >= min(2, others) > 0:
        return True
    return asked > 0 and gang_turn.now - gang_turn.observed.suspected_since[node] >= CAUSE_WAIT_S


def _remove_if_slurm_has(gang_turn: GangTurn, member: Member) -> None:
    """No other agent can be asked, so Slurm decides: remove a silent member whose node is no longer in the job. For a
    node of the shared pool, Slurm must have the node DOWN."""
    if member.job == gang_turn.gang.slurm.job:
        removed = bool(gang_turn.gang.slurm.job_nodes) and member.node not in gang_turn.gang.slurm.job_nodes
    else:
        removed = gang_turn.turn.observed.node(member.node).down
    if removed or gang_turn.job_requeued or gang_turn.job_ended:
        fencing.remove_member(
            gang_turn, member, f"{member.node} is silent, and Slurm has taken it out of the job", alive=False
        )


def _node_answered(gang_turn: GangTurn, member: Member) -> None:
    """The node answered a witness: drop the suspicion. If the agent stays out of the coordinator's reach for
    OUT_OF_TOUCH_S while its gang waits for it, the member is removed: another member that it knows tells it."""
    away_s = gang_turn.now - _out_of_touch_since(gang_turn, member)
    is_told = not fencing.has_heard_of_none(gang_turn, member.node)
    if is_told and away_s >= OUT_OF_TOUCH_S and _gang_needs_member(gang_turn, member, away_s):
        reason = f"{member.node} answers others, but the coordinator has not reached it for {away_s:.0f} s"
        fencing.remove_member(gang_turn, member, reason, alive=False)
        return
    clear_suspicion(gang_turn.observed, member.node, gang_turn.now)
    if gang_turn.gang.phase in FENCING or not gang_turn.observed.is_attached(member.node):
        gang_turn.turn.tick_at(gang_turn.now + FENCE_ANSWER_S)  # what the node has not answered yet is looked at again


def _gang_needs_member(gang_turn: GangTurn, member: Member, away_s: float) -> bool:
    """The gang can't go on without a word of this member: its fence, its knowledge of removed members, or a step."""
    if gang_turn.gang.phase in FENCING:
        return (
            not fencing.ranks_ended(gang_turn, member)
            or gang_turn.observed.status(member.node).order_serial < gang_turn.gang.order_serial
        )
    timeout_s = progress_timeouts.silent_agent_timeout_s(
        gang_turn.gang, gang_turn.index, gang_turn.observed, member.node
    )
    return min(away_s, gang_turn.now - progress_timeouts.last_progress_at(gang_turn)) >= timeout_s


def _out_of_touch_since(gang_turn: GangTurn, member: Member) -> float:
    """Since when the agent and the coordinator do not hear each other; now, if that is not known."""
    heard_at = gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, member.node)
    reached, since = gang_turn.observed.reachability.get(member.node, (True, gang_turn.now))
    return max(fencing.phase_observed_since(gang_turn), min(heard_at, gang_turn.now if reached else since))


def _take_out_unless_many(gang_turn: GangTurn, member: Member, health: NodeHealth, reason: str) -> None:
    """Take the node out of service, unless many nodes are silent at once: that may be the coordinator's own network.
    Then wait until the suspicion is CAUSE_WAIT_S old."""
    silent_s = gang_turn.now - gang_turn.observed.suspected_since[member.node]
    if silent_s < CAUSE_WAIT_S and outage.many_silent(gang_turn, member.node):
        gang_turn.turn.tick_at(gang_turn.now + outage.RECHECK_S)
        return
    _take_out(gang_turn, member, health, reason)


def _take_out(gang_turn: GangTurn, member: Member, health: NodeHealth, reason: str) -> None:
    """Take the silent node out of service, and the member out of its gang. The coordinator's own probe of the node's
    daemon is part of the evidence: where no daemon was ever heard, the health of the node does not change."""
    if gang_turn.turn.state.node(member.node).probe_address:
        circuit_breaker.take_out_of_service(gang_turn.turn, gang_turn.gang, member.node, health, reason)
    fencing.remove_member(gang_turn, member, reason, alive=False)
