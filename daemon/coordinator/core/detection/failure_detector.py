"""The failure detector: which nodes are suspected, how they are probed, and what follows from the answers.

A node is suspected when a watched peer accuses it, when its agent's stream ends or brings nothing, or when its agent
does not acknowledge a fence. A suspicion leads to a round of probes and to nothing else. Only the result of a round
(`probe_result`) removes a node from its gang. A node is LOST or HUNG only if two other agents have found it silent: the
coordinator's own probes are one witness and never enough.
"""

from math import inf

from muster.daemon.coordinator.core.detection import circuit_breaker, outage, progress_timeouts
from muster.daemon.coordinator.core.detection.probe_result import ProbeResult, evaluate
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S, OUT_OF_TOUCH_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.observed_state import (
    AGENT,
    HEARTBEAT_TIMEOUT_S,
    MUSTERD,
    NODE_HEARTBEAT_S,
    Probe,
    clear_suspicion,
    stop_suspecting,
)
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED, Phase
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.gang_index import silent_watched_peers
from muster.daemon.coordinator.core.turn.turn import GangTurn, ProbeRequest
from muster.node_health import NodeHealth

PROBE_TIMEOUT_S = 0.75
"""Seconds that a probe waits for an answer. A busy but healthy node answers in time. The wait is part of every
detection of a silent node, so it is short."""
CLOSED_PROBE_TIMEOUT_S = 0.4
"""Seconds that a probe waits if the node's own kernel has closed the agent's connections. The probe only confirms."""
LATE_ANSWER_S = 0.35
"""Seconds after the timeout of a probe in which a witness's answer may still arrive. Then the round is repeated."""
HUNG_AFTER_S = 4.0
"""Seconds between the first and the last round of probes that only the kernel answered, before a node is HUNG.
Processes of a healthy node that wait for a processor or for memory answer again within seconds."""
MISSED_HEARTBEAT_S = NODE_HEARTBEAT_S + 1.0
"""Seconds after the last heartbeat of a node's daemon until the next one is missed."""
FENCE_ANSWER_S = 0.4
"""Seconds within which a healthy agent acknowledges a fence. After that its node is probed."""
REATTACH_S = 5.0
"""Seconds within which an agent attaches again after its stream broke, or after a restart of the coordinator."""
KILL_TIMEOUT_S = 10.0
"""Seconds after which a rank that SIGKILL has not ended makes its node UNFIT."""
OUTAGE_RECHECK_S = 1.0
"""Seconds until the next look at how many nodes are silent or stuck, while a node waits for that."""
MUTE_TIMEOUT_S = 10.0
"""Seconds after which an agent that does not answer, while its node's daemon does, loses its place in the gang."""


def examine(gang_turn: GangTurn) -> None:
    """Suspect the nodes that give reason to, act on finished rounds of probes, and start rounds that are due."""
    if gang_turn.gang.phase not in MONITORED:
        return
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
            _probe_if_due(gang_turn, member)


def _may_be_removed(gang_turn: GangTurn, node: str) -> bool:
    """Every witness finds the node silent, and not too many nodes are known to be silent."""
    probe = gang_turn.observed.probes.get(node)
    silent = probe is not None and evaluate(probe, gang_turn.observed.last_step_at) in (
        ProbeResult.HUNG,
        ProbeResult.LOST,
    )
    return silent and len(gang_turn.observed.suspected_since) <= outage.chance_limit(gang_turn)


def _overdue_nodes(gang_turn: GangTurn) -> set[str]:
    """Nodes that may have to be probed, whatever the event is about."""
    suspected = gang_turn.observed.suspected_since.keys()
    return gang_turn.index.unattached | suspected | _without_acknowledgement(gang_turn) | _silent_agents(gang_turn)


def _without_acknowledgement(gang_turn: GangTurn) -> set[str]:
    """Nodes that had time to acknowledge the fence, or to open the store, and did not."""
    gang, unfenced = gang_turn.gang, gang_turn.index.unfenced
    if gang.phase not in FENCING or (not unfenced and gang_turn.store_listens()):
        return set()
    due = _phase_observed_since(gang_turn) + FENCE_ANSWER_S
    if gang_turn.now < due:
        gang_turn.turn.tick_at(due)
        return set()
    return {*unfenced, gang.recovery.next_store_node}


def _phase_observed_since(gang_turn: GangTurn) -> float:
    """Since when this coordinator observes the gang in its present phase: it may have started, or stood still, later
    than the phase began."""
    return max(gang_turn.gang.phase_at, gang_turn.turn.observed.observing_since)


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


def ranks_ended(gang_turn: GangTurn, member: Member) -> bool:
    """No rank of the fenced generation runs on the member's node, or only its kernel still holds one: the agent has
    acknowledged the fence, or the member was removed because its ranks outlived SIGKILL."""
    outlives_kill = member.removed and gang_turn.now > _kill_timeout_at(gang_turn, member)
    return outlives_kill or gang_turn.has_fenced(member.node)


def _kill_timeout_at(gang_turn: GangTurn, member: Member) -> float:
    """When the agent has had the fence for KILL_TIMEOUT_S; infinite if it is not certain that the fence has arrived.

    It is certain if the stream is open and the coordinator's own probes reach the agent.
    """
    agent = gang_turn.observed.agents.get(member.node)
    reached, reached_at = gang_turn.observed.reachability.get(member.node, (False, gang_turn.now))
    if agent is None or not agent.attached or not reached:
        return inf
    return max(_phase_observed_since(gang_turn), agent.attached_at, reached_at) + KILL_TIMEOUT_S


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
    asked_at = max(_phase_observed_since(gang_turn), gang_turn.observed.cleared_at.get(member.node, 0.0))
    if fenced:
        # The fence is acknowledged, only the store is missing.
        asked_at = max(asked_at, gang_turn.gang.recovery.store_at)
    if gang_turn.now < asked_at + FENCE_ANSWER_S:
        gang_turn.turn.tick_at(asked_at + FENCE_ANSWER_S)
    else:
        gang_turn.observed.suspected_since.setdefault(member.node, asked_at)
    if not fenced:
        _take_out_if_stuck(gang_turn, member)


def _take_out_if_stuck(gang_turn: GangTurn, member: Member) -> None:
    """Take the node out of service if its ranks outlive SIGKILL."""
    timeout_at = _kill_timeout_at(gang_turn, member)
    if timeout_at == inf:
        return
    if gang_turn.now <= timeout_at:
        gang_turn.turn.tick_at(timeout_at)
    elif not member.removed and not _waits_for_many_stuck(gang_turn):
        reason = f"ranks on {member.node} could not be killed within {KILL_TIMEOUT_S:.0f} s"
        circuit_breaker.drain_if_run_has_node(gang_turn.turn, gang_turn.gang, member, reason)
        remove_member(gang_turn, member, reason, alive=True)


def _waits_for_many_stuck(gang_turn: GangTurn) -> bool:
    """Ranks on many nodes can't be killed: no node is blamed for CAUSE_WAIT_S, because the nodes share a cause."""
    observed = gang_turn.turn.observed
    if outage.many_stuck(gang_turn):
        observed.many_stuck_at = gang_turn.now
    # Shared storage that comes back releases one node after another.
    wait_ends_at = min(_phase_observed_since(gang_turn) + CAUSE_WAIT_S, observed.many_stuck_at + outage.STUCK_AFTER_S)
    if gang_turn.now >= wait_ends_at:
        return False
    gang_turn.turn.tick_at(gang_turn.now + OUTAGE_RECHECK_S)
    return True


def _act_on_result(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.observed.probes.get(member.node)
    if probe is None:
        return
    result = evaluate(probe, gang_turn.observed.last_step_at, _daemon_heard(gang_turn, member.node))
    if result in (ProbeResult.HUNG, ProbeResult.LOST) and not _witnessed(gang_turn, member, probe):
        _remove_if_slurm_has(gang_turn, member)
        return
    if result is ProbeResult.HUNG:
        gang_turn.observed.kernel_only_since.setdefault(member.node, probe.asked_at)
    elif result is not ProbeResult.OPEN:
        gang_turn.observed.kernel_only_since.pop(member.node, None)
    if result in (ProbeResult.HUNG, ProbeResult.AGENT_MUTE) and progress_timeouts.step_may_be_under_way(
        gang_turn, member
    ):
        result = ProbeResult.OPEN
    match result:
        case ProbeResult.ALIVE:
            _node_answered(gang_turn, member)
        case ProbeResult.AGENT_ENDED:
            remove_member(gang_turn, member, member.agent_ended_reason, alive=False)
        case ProbeResult.AGENT_MUTE:
            if gang_turn.now - gang_turn.observed.suspected_since[member.node] > MUTE_TIMEOUT_S:
                remove_member(gang_turn, member, f"muster-agent on {member.node} does not answer", alive=False)
        case ProbeResult.HUNG if _hangs(gang_turn, member.node, probe):
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_out_unless_many(gang_turn, member, NodeHealth.HUNG, reason)
        case ProbeResult.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_out_unless_many(gang_turn, member, NodeHealth.LOST, reason)
        case ProbeResult.OPEN if _spare_is_silent(gang_turn, member, probe):
            reason = f"{member.node}, which carries no rank, has not answered anybody for {CAUSE_WAIT_S:.0f} s"
            remove_member(gang_turn, member, reason, alive=False)
        case ProbeResult.HUNG | ProbeResult.OPEN:
            pass


def _daemon_heard(gang_turn: GangTurn, node: str) -> bool:
    """The node's daemon was heard since only the kernel answers probes there. Strangers may hold all connections that
    the daemon's port allows, so the daemon's own stream counts more than a probe of that port."""
    daemon = gang_turn.turn.observed.node(node)
    return daemon.attached and daemon.heard_at > gang_turn.observed.kernel_only_since.get(node, inf)


def _hangs(gang_turn: GangTurn, node: str, probe: Probe) -> bool:
    """Only the kernel has answered for HUNG_AFTER_S, and an attached daemon has missed a heartbeat."""
    daemon = gang_turn.turn.observed.node(node)
    if daemon.attached and gang_turn.now < daemon.heard_at + MISSED_HEARTBEAT_S:
        gang_turn.turn.tick_at(daemon.heard_at + MISSED_HEARTBEAT_S)
        return False
    return probe.asked_at - gang_turn.observed.kernel_only_since[node] >= HUNG_AFTER_S


def _spare_is_silent(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """A member without a seat has been silent for CAUSE_WAIT_S.

    Steps of the gang prove nothing about such a member. While there are steps its node health does not change.
    But the member is removed, because a recovery would wait for it.
    """
    seat = gang_turn.index.seats.get(member.node)
    if (seat is not None and seat.group_rank >= 0) or gang_turn.now - gang_turn.observed.suspected_since[
        member.node
    ] < CAUSE_WAIT_S:
        return False
    return evaluate(probe, moved_at=0.0) not in (ProbeResult.ALIVE, ProbeResult.OPEN) and _witnessed(
        gang_turn, member, probe
    )


def _witnessed(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """Two agents besides the coordinator have found the member silent.

    If the gang has only one other agent, one is enough. If more agents exist but can't be asked, one is enough after
    CAUSE_WAIT_S. The coordinator's own probes are never enough: the link of the coordinator may be what is cut.
    """
    others = len(gang_turn.index.present) - 1
    asked = len(gang_turn.index.present.intersection(probe.witnesses))  # a removed member is no witness
    if asked >= min(2, others) > 0:
        return True
    return asked > 0 and gang_turn.now - gang_turn.observed.suspected_since[member.node] >= CAUSE_WAIT_S


def _remove_if_slurm_has(gang_turn: GangTurn, member: Member) -> None:
    """No other agent can be asked, so Slurm decides: remove a silent member whose node is no longer in the job. For a
    node of the shared pool, Slurm must have the node DOWN."""
    if member.job == gang_turn.gang.slurm.job:
        removed = bool(gang_turn.gang.slurm.job_nodes) and member.node not in gang_turn.gang.slurm.job_nodes
    else:
        removed = gang_turn.turn.observed.node(member.node).down
    if removed or gang_turn.job_requeued or gang_turn.job_ended:
        remove_member(gang_turn, member, f"{member.node} is silent, and Slurm has taken it out of the job", alive=False)


def _node_answered(gang_turn: GangTurn, member: Member) -> None:
    """The node answered a witness: drop the suspicion. If the agent stays out of the coordinator's reach for
    OUT_OF_TOUCH_S while its gang waits for it, the member is removed."""
    away_s = gang_turn.now - _out_of_touch_since(gang_turn, member)
    if away_s >= OUT_OF_TOUCH_S and _gang_needs_member(gang_turn, member, away_s):
        reason = f"{member.node} answers others, but the coordinator has not reached it for {away_s:.0f} s"
        remove_member(gang_turn, member, reason, alive=False)
        return
    clear_suspicion(gang_turn.observed, member.node, gang_turn.now)
    if gang_turn.gang.phase in FENCING or not gang_turn.observed.is_attached(member.node):
        gang_turn.turn.tick_at(gang_turn.now + FENCE_ANSWER_S)  # what the node has not answered yet is looked at again


def _gang_needs_member(gang_turn: GangTurn, member: Member, away_s: float) -> bool:
    """The gang can't go on without a word of this member: its fence, its knowledge of removed members, or a step."""
    if gang_turn.gang.phase in FENCING:
        return (
            not ranks_ended(gang_turn, member)
            or gang_turn.observed.status(member.node).order_serial < gang_turn.gang.order_serial
        )
    return min(
        away_s, gang_turn.now - progress_timeouts.last_progress_at(gang_turn)
    ) >= progress_timeouts.silent_agent_timeout_s(gang_turn, member)


def _out_of_touch_since(gang_turn: GangTurn, member: Member) -> float:
    """Since when the agent and the coordinator do not hear each other; now, if that is not known."""
    heard_at = gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, member.node)
    reached, since = gang_turn.observed.reachability.get(member.node, (True, gang_turn.now))
    return max(_phase_observed_since(gang_turn), min(heard_at, gang_turn.now if reached else since))


def _probe_if_due(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.observed.probes.get(member.node)
    closed = member.node in gang_turn.observed.closed_by
    timeout_s = CLOSED_PROBE_TIMEOUT_S if closed else PROBE_TIMEOUT_S
    if probe is not None:
        due = probe.asked_at + timeout_s + (0.0 if probe.complete else LATE_ANSWER_S)
        if gang_turn.now < due:
            gang_turn.turn.tick_at(due)
            return
        for mute in (w for w in probe.witnesses if w not in probe.silence_by_witness and w not in (AGENT, MUSTERD)):
            gang_turn.observed.suspected_since.setdefault(mute, gang_turn.now)
            gang_turn.turn.tick_at(gang_turn.now)  # a witness that does not answer is suspected too, and probed next
    _start_probe(gang_turn, member, timeout_s)
    gang_turn.turn.tick_at(gang_turn.now + timeout_s + LATE_ANSWER_S)


def _start_probe(gang_turn: GangTurn, member: Member, deadline_s: float) -> None:
    away, suspected = gang_turn.index.unattached, gang_turn.observed.suspected_since
    present = gang_turn.index.in_fabric_order(gang_turn.fabric)
    candidates = (node for node in present if node not in away and node not in suspected)
    others = placement.witnesses(gang_turn.fabric, candidates, member.node, 2)
    gang_turn.turn.observed.last_probe_number += 1
    number = gang_turn.turn.observed.last_probe_number
    asked = (AGENT, MUSTERD, *others)
    gang_turn.observed.probes[member.node] = Probe(number, member.node, asked, gang_turn.now)
    address = gang_turn.turn.state.node(member.node).probe_address
    gang_turn.turn.outcome.probe_requests.append(
        ProbeRequest(number, gang_turn.gang.id, member.node, asked, member.peer_address, address, deadline_s)
    )


def _take_out_unless_many(gang_turn: GangTurn, member: Member, health: NodeHealth, reason: str) -> None:
    """Take the node out of service, unless many nodes are silent at once: that may be the coordinator's own network.
    Then wait until the suspicion is CAUSE_WAIT_S old."""
    silent_s = gang_turn.now - gang_turn.observed.suspected_since[member.node]
    if silent_s < CAUSE_WAIT_S and outage.many_silent(gang_turn, member.node):
        gang_turn.turn.tick_at(gang_turn.now + OUTAGE_RECHECK_S)
        return
    _take_out(gang_turn, member, health, reason)


def _take_out(gang_turn: GangTurn, member: Member, health: NodeHealth, reason: str) -> None:
    """Take the silent node out of service, and the member out of its gang. The coordinator's own probe of the node's
    daemon is part of the evidence: where no daemon was ever heard, the health of the node does not change."""
    if gang_turn.turn.state.node(member.node).probe_address:
        circuit_breaker.take_out_of_service(gang_turn.turn, gang_turn.gang, member.node, health, reason)
    remove_member(gang_turn, member, reason, alive=False)


def remove_member(
    gang_turn: GangTurn, member: Member, reason: str, alive: bool, left_job: bool = False, requested: bool = False
) -> None:
    """Remove the member from its gang. If it carries ranks of a live generation, fence that generation first."""
    suspected = gang_turn.observed.suspected_since.get(member.node, gang_turn.now)
    carries = any(seat.node == member.node for seat in gang_turn.gang.roster.seats)
    if carries and gang_turn.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence_generation(gang_turn, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gang_turn.turn.record(
        facts.MemberRemoved(gang_turn.gang.id, member.node, reason, alive, left_job=left_job, requested=requested)
    )
    stop_suspecting(gang_turn.observed, member.node)


def fence_generation(
    gang_turn: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "", crashed_on: str = ""
) -> None:
    """Order the end of every rank of the running generation."""
    gang = gang_turn.gang
    step = max(
        gang_turn.observed.step_number, gang.restore.restored_version.step if gang.restore.restored_version else 0
    )  # no agent may have reported a step yet
    store = choose_store_node(gang_turn, not_on)
    gang_turn.turn.record(
        facts.GenerationFenced(gang.id, gang.newest.generation, cause, hardware, store, step, suspected_at, crashed_on)
    )


def choose_store_node(gang_turn: GangTurn, not_on: str = "") -> str:
    """The node that shall open the next rendezvous store: the first seat whose agent is in touch, else any such member.
    `not_on`: a node that is about to be removed."""
    seats = [seat.node for seat in gang_turn.gang.roster.seats]
    usable = [m.node for m in gang_turn.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gang_turn.observed.is_attached(n) and n not in gang_turn.observed.suspected_since]
    return next(iter(touch or order), "")
