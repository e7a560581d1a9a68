"""Suspicion: who is asked after, and what the answers lead to.

A suspicion arises from an accusation, a stream that ended, or a fence that is not answered. It leads to a round of
probes and to nothing else; only the finding of a round (`verdict`) takes a node from its gang.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker, outage, progress_timeouts
from muster.daemon.coordinator.core.detection.probe_result import ProbeResult, evaluate
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S, OUT_OF_TOUCH_S
from muster.daemon.coordinator.core.state import facts, placement
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.gang_index import silent_neighbours
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD, Probe, clear_suspicion, stop_suspecting
from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED, NodeHealth, Phase
from muster.daemon.coordinator.core.state.turn import GangTurn, ProbeRequest

PROBE_TIMEOUT_S = 0.75
"""Deadline of a probe. A loaded but fit node answers within it; it is part of every detection of a silent node."""
CLOSED_PROBE_TIMEOUT_S = 0.4
"""Deadline where the node's own kernel has closed the agent's connections: the probes only confirm."""
LATE_ANSWER_S = 0.35
"""How long after the deadline a witness's answer may arrive before the round is given up and others are asked."""
HUNG_AFTER_S = 4.0
"""Processes of a fit node that get no processor, or wait for memory, answer again after seconds. So a node is hung only
where rounds of probes have found nothing but its kernel for so long: the last began this long after the first."""
FENCE_ANSWER_S = 0.4
"""A fence is answered within this by an agent that can; later, its node is probed."""
HEARTBEAT_TIMEOUT_S = 11.0
"""An agent pings every 5 s: two that did not come, and a margin. Neighbours are faster, where there are any left."""
REATTACH_S = 5.0
"""An agent attaches anew within this, after its stream broke or the coordinator was restarted."""
KILL_TIMEOUT_S = 10.0
"""A rank that can't be killed in this time makes its node UNFIT."""
MUTE_TIMEOUT_S = 10.0
"""An agent that stays mute this long while its node's daemon answers gives up its place."""


def examine(gang_turn: GangTurn) -> None:
    """Raise suspicions that the phase gives rise to, judge finished rounds, ask anew where that is due."""
    if gang_turn.gang.phase not in MONITORED:
        return
    if gang_turn.turn.changed_node is not None and _may_be_taken(gang_turn, gang_turn.turn.changed_node):
        gang_turn.turn.changed_node = None  # who else is silent by now counts
    suspected, about = gang_turn.observed.suspected_since, gang_turn.turn.changed_node
    looked_at = suspected.keys() if about is None else suspected.keys() & {about}
    for gone in looked_at - gang_turn.index.expected:
        stop_suspecting(gang_turn.observed, gone)
    pending = _suspect_unheard(gang_turn) | (_lacking(gang_turn) if about is None else {about})
    members = [gang_turn.gang.members[node] for node in sorted(pending & gang_turn.index.expected)]
    for member in members:  # all of them before anybody is judged: whether many are silent at once decides
        _suspect_unattached(gang_turn, member)
        _suspect_unfenced(gang_turn, member)
    for member in members:
        if member.node in suspected:
            _judge(gang_turn, member)
        if member.node in suspected:
            _ask(gang_turn, member)
    if suspected:
        gang_turn.turn.tick_at(gang_turn.now + 0.05)


def _may_be_taken(gang_turn: GangTurn, node: str) -> bool:
    """All witnesses find it silent, and it is not known yet that too many are."""
    probe = gang_turn.observed.probes.get(node)
    silent = probe is not None and evaluate(probe, gang_turn.observed.last_step_at) in (
        ProbeResult.HUNG,
        ProbeResult.LOST,
    )
    return silent and len(gang_turn.observed.suspected_since) <= outage.chance_limit(gang_turn)


def _lacking(gang_turn: GangTurn) -> set[str]:
    """Who may have to be asked after, whatever the event told of."""
    return gang_turn.index.unattached | gang_turn.observed.suspected_since.keys() | _late(gang_turn) | _mute(gang_turn)


def _late(gang_turn: GangTurn) -> set[str]:
    """Who might have answered the fence by now and did not, or opened no store."""
    gang, unfenced = gang_turn.gang, gang_turn.index.unfenced
    if gang.phase not in FENCING or (not unfenced and gang_turn.store_listens()):
        return set()
    gang_turn.turn.tick_at(gang_turn.now + 0.05)
    early = gang_turn.now - max(gang.phase_at, gang_turn.turn.observed.observing_since) <= FENCE_ANSWER_S
    return set() if early else {*unfenced, gang.store_node}


def _mute(gang_turn: GangTurn) -> set[str]:
    """Whose stream is open and brings nothing. All are looked at only when the first of them may be overdue."""
    index = gang_turn.index
    overdue = set()
    if gang_turn.now >= index.heartbeat_check_at:
        since = {node: _in_touch_at(gang_turn, node) for node in index.expected - index.unattached}
        overdue = {node for node, at in since.items() if gang_turn.now - at >= HEARTBEAT_TIMEOUT_S}
        index.heartbeat_check_at = (
            min((at for node, at in since.items() if node not in overdue), default=gang_turn.now) + HEARTBEAT_TIMEOUT_S
        )
    gang_turn.turn.tick_at(index.heartbeat_check_at)
    return overdue


def _in_touch_at(gang_turn: GangTurn, node: str) -> float:
    """When an agent whose stream is open was last heard, or cleared."""
    return max(
        gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, node), gang_turn.observed.cleared_at.get(node, 0.0)
    )


def ranks_ended(gang_turn: GangTurn, member: Member) -> bool:
    """No rank of the fenced generation runs on it: its agent says so, or only the kernel still has it."""
    return gang_turn.has_fenced(member.node) or (member.removed and _outlives_kill(gang_turn, member))


def _outlives_kill(gang_turn: GangTurn, member: Member) -> bool:
    """It has surely had the fence for so long: its stream is open and the coordinator's own probes get through."""
    agent = gang_turn.observed.agents.get(member.node)
    reached, reached_at = gang_turn.observed.reachability.get(member.node, (False, gang_turn.now))
    if agent is None or not agent.attached or not reached:
        return False
    since = max(
        gang_turn.gang.phase_at, gang_turn.turn.observed.observing_since
    )  # what came while the coordinator stood still is unread yet
    return gang_turn.now - max(since, agent.attached_at, reached_at) > KILL_TIMEOUT_S


def _suspect_unheard(gang_turn: GangTurn) -> set[str]:
    """A neighbour's silence stands in its watchers' statuses too: an accusation survives a coordinator's restart.

    Returns: who is suspected by that, as of now.
    """
    index, about, seen = gang_turn.index, gang_turn.turn.changed_node, gang_turn.observed
    unheard = set()
    for watcher in sorted(index.accusers if about is None else index.accusers & {about}):
        agent = seen.agents[watcher]
        for node in silent_neighbours(index.seats[watcher], agent.status):
            if node in index.present and agent.reported_at > seen.cleared_at.get(node, 0.0):
                unheard.add(node)
                seen.suspected_since.setdefault(node, agent.reported_at)
    return unheard


def _suspect_unattached(gang_turn: GangTurn, member: Member) -> None:
    """An agent that is out of touch for longer than attaching anew takes is asked after; so is one whose stream is
    open and brings nothing: a node that loses power closes no stream."""
    agent = gang_turn.observed.agents.get(member.node)
    if agent and agent.attached:
        since, patience = _in_touch_at(gang_turn, member.node), HEARTBEAT_TIMEOUT_S
    else:
        since = max(
            gang_turn.turn.observed.observing_since,
            gang_turn.observed.cleared_at.get(member.node, 0.0),
            agent.gone_at if agent else 0.0,
        )
        patience = REATTACH_S
    if gang_turn.now - since >= patience:
        gang_turn.observed.suspected_since.setdefault(member.node, gang_turn.now)
    else:
        gang_turn.turn.tick_at(since + patience)


def _suspect_unfenced(gang_turn: GangTurn, member: Member) -> None:
    fenced = gang_turn.has_fenced(member.node)
    if gang_turn.gang.phase not in FENCING or (
        fenced and (member.node != gang_turn.gang.store_node or gang_turn.store_listens())
    ):
        return
    asked_at = max(
        gang_turn.gang.phase_at,
        gang_turn.turn.observed.observing_since,
        gang_turn.observed.cleared_at.get(member.node, 0.0),
    )
    if fenced:
        asked_at = max(asked_at, gang_turn.gang.store_at)  # only the store is missing
    gang_turn.turn.tick_at(gang_turn.now + 0.05)
    if gang_turn.now - asked_at > FENCE_ANSWER_S and member.node not in gang_turn.observed.suspected_since:
        gang_turn.observed.suspected_since[member.node] = asked_at
    if not fenced and not member.removed and _outlives_kill(gang_turn, member) and not _is_held(gang_turn):
        reason = f"ranks on {member.node} could not be killed within {KILL_TIMEOUT_S:.0f} s"
        _take(gang_turn, member, NodeHealth.UNFIT, reason)


def _is_held(gang_turn: GangTurn) -> bool:
    """Nobody is to blame for ranks that can't be killed before a minute has passed, where many can't."""
    since, observed = max(gang_turn.gang.phase_at, gang_turn.turn.observed.observing_since), gang_turn.turn.observed
    if outage.many_stuck(gang_turn):
        observed.many_stuck_at = gang_turn.now
    # What held them all lets go of one after another.
    return gang_turn.now - since < CAUSE_WAIT_S and gang_turn.now - observed.many_stuck_at < outage.STUCK_AFTER_S


def _judge(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.observed.probes.get(member.node)
    if probe is None:
        return
    finding = evaluate(probe, gang_turn.observed.last_step_at)
    if finding in (ProbeResult.HUNG, ProbeResult.LOST) and not _witnessed(gang_turn, member, probe):
        _follow_slurm(gang_turn, member)
        return
    if finding is ProbeResult.HUNG:
        gang_turn.observed.kernel_only_since.setdefault(member.node, probe.asked_at)
    elif finding is not ProbeResult.OPEN:
        gang_turn.observed.kernel_only_since.pop(member.node, None)
    if finding in (ProbeResult.HUNG, ProbeResult.AGENT_MUTE) and progress_timeouts.step_may_be_under_way(
        gang_turn, member
    ):
        finding = ProbeResult.OPEN
    match finding:
        case ProbeResult.ALIVE:
            _alive(gang_turn, member)
        case ProbeResult.AGENT_ENDED:
            remove_member(gang_turn, member, f"muster-agent on {member.node} has ended", alive=False)
        case ProbeResult.AGENT_MUTE:
            if gang_turn.now - gang_turn.observed.suspected_since[member.node] > MUTE_TIMEOUT_S:
                remove_member(gang_turn, member, f"muster-agent on {member.node} does not answer", alive=False)
        case ProbeResult.HUNG if probe.asked_at - gang_turn.observed.kernel_only_since[member.node] >= HUNG_AFTER_S:
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_unless_many(gang_turn, member, NodeHealth.HUNG, reason)
        case ProbeResult.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_unless_many(gang_turn, member, NodeHealth.LOST, reason)
        case ProbeResult.OPEN if _is_missed(gang_turn, member, probe):
            reason = f"{member.node}, which carries no rank, has not answered anybody for {CAUSE_WAIT_S:.0f} s"
            remove_member(gang_turn, member, reason, alive=False)
        case ProbeResult.HUNG | ProbeResult.OPEN:
            pass


def _is_missed(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """The gang's steps do not speak for a member without a seat. It gets no verdict while there are any, but it is not
    counted on for ever: a recovery would wait for it."""
    seat = gang_turn.index.seats.get(member.node)
    if (seat is not None and seat.group_rank >= 0) or gang_turn.now - gang_turn.observed.suspected_since[
        member.node
    ] < CAUSE_WAIT_S:
        return False
    return evaluate(probe, moved_at=0.0) not in (ProbeResult.ALIVE, ProbeResult.OPEN) and _witnessed(
        gang_turn, member, probe
    )


def _witnessed(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """Besides the coordinator two other agents have found it silent. Where fewer are left that can be asked, one will
    do, after the longest wait: the coordinator's word alone never does, for its own link may be what is cut."""
    others = len(gang_turn.index.present) - 1
    asked = len(gang_turn.index.present.intersection(probe.witnesses))  # who has gone out since is no witness
    if asked >= min(2, others) > 0:
        return True
    return asked > 0 and gang_turn.now - gang_turn.observed.suspected_since[member.node] >= CAUSE_WAIT_S


def _follow_slurm(gang_turn: GangTurn, member: Member) -> None:
    """Nobody is left to ask: who is silent and no longer in the job has been given up by Slurm. A node of the shared
    pool, whose small job nobody looks at, is given up when Slurm has it down."""
    if member.job == gang_turn.gang.job:
        taken = bool(gang_turn.gang.job_nodes) and member.node not in gang_turn.gang.job_nodes
    else:
        taken = gang_turn.turn.observed.node(member.node).down
    if taken or gang_turn.job_requeued or gang_turn.job_ended:
        remove_member(gang_turn, member, f"{member.node} is silent, and Slurm has taken it out of the job", alive=False)


def _alive(gang_turn: GangTurn, member: Member) -> None:
    """It answered somebody. That clears it; should it not be in touch with the coordinator it is asked after again."""
    away_s = gang_turn.now - _out_of_touch_since(gang_turn, member)
    if away_s >= OUT_OF_TOUCH_S and _keeps_waiting(gang_turn, member, away_s):
        reason = f"{member.node} answers others, but the coordinator has not reached it for {away_s:.0f} s"
        remove_member(gang_turn, member, reason, alive=False)
        return
    clear_suspicion(gang_turn.observed, member.node, gang_turn.now)
    if not gang_turn.observed.is_attached(member.node):
        gang_turn.turn.tick_at(gang_turn.now + FENCE_ANSWER_S)


def _keeps_waiting(gang_turn: GangTurn, member: Member, away_s: float) -> bool:
    """Its gang can't go on without its word: its fence, its knowledge of who is out, a step. And none will come."""
    if gang_turn.gang.phase in FENCING:
        return (
            not ranks_ended(gang_turn, member)
            or gang_turn.observed.status(member.node).order_serial < gang_turn.gang.order_serial
        )
    return min(
        away_s, gang_turn.now - progress_timeouts.last_progress_at(gang_turn)
    ) >= progress_timeouts.silent_agent_timeout_s(gang_turn, member)


def _out_of_touch_since(gang_turn: GangTurn, member: Member) -> float:
    """Since when it does not hear the coordinator, or is not heard by it; now, where neither is known."""
    began = max(gang_turn.gang.phase_at, gang_turn.turn.observed.observing_since)
    heard_at = gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, member.node)
    reached, since = gang_turn.observed.reachability.get(member.node, (True, gang_turn.now))
    return max(began, min(heard_at, gang_turn.now if reached else since))


def _ask(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.observed.probes.get(member.node)
    closed = member.node in gang_turn.observed.closed_by
    if probe is not None:
        deadline = CLOSED_PROBE_TIMEOUT_S if closed else PROBE_TIMEOUT_S
        spent = gang_turn.now - probe.asked_at
        if spent < deadline + LATE_ANSWER_S and not (probe.complete and spent > deadline):
            return
        for mute in (w for w in probe.witnesses if w not in probe.silence_by_witness and w not in (AGENT, MUSTERD)):
            gang_turn.observed.suspected_since.setdefault(
                mute, gang_turn.now
            )  # a witness that does not answer is asked after itself
    _send(gang_turn, member, CLOSED_PROBE_TIMEOUT_S if closed else PROBE_TIMEOUT_S)


def _send(gang_turn: GangTurn, member: Member, deadline_s: float) -> None:
    away, suspected = gang_turn.index.unattached, gang_turn.observed.suspected_since
    candidates = (
        m for m in gang_turn.index.in_fabric_order(gang_turn.gang) if m.node not in away and m.node not in suspected
    )
    others = placement.witnesses(candidates, member.node, member.leaf, 2)
    gang_turn.turn.observed.last_probe_number += 1
    number = gang_turn.turn.observed.last_probe_number
    asked = (AGENT, MUSTERD, *others)
    gang_turn.observed.probes[member.node] = Probe(number, member.node, asked, gang_turn.now)
    address = gang_turn.turn.state.node(member.node).probe_address
    gang_turn.turn.outcome.probe_requests.append(
        ProbeRequest(number, gang_turn.gang.id, member.node, asked, member.peer_address, address, deadline_s)
    )


def _take_unless_many(gang_turn: GangTurn, member: Member, verdict: NodeHealth, reason: str) -> None:
    """Many nodes silent at once may be the observer's own trouble: hold until the suspicion is a minute old."""
    if gang_turn.now - gang_turn.observed.suspected_since[member.node] < CAUSE_WAIT_S and outage.many_silent(gang_turn):
        gang_turn.turn.tick_at(gang_turn.now + 1.0)
        return
    _take(gang_turn, member, verdict, reason)


def _take(gang_turn: GangTurn, member: Member, verdict: NodeHealth, reason: str) -> None:
    circuit_breaker.take_out_of_service(gang_turn.turn, gang_turn.gang, member.node, verdict, reason)
    remove_member(gang_turn, member, reason, alive=verdict is NodeHealth.UNFIT)


def remove_member(gang_turn: GangTurn, member: Member, reason: str, alive: bool) -> None:
    """Take a member out of its gang; where it carries ranks of a live generation, that generation is fenced first."""
    suspected = gang_turn.observed.suspected_since.get(member.node, gang_turn.now)
    carries = any(seat.node == member.node for seat in gang_turn.gang.seats)
    if carries and gang_turn.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence_generation(gang_turn, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gang_turn.turn.record(facts.MemberRemoved(gang_turn.gang.id, member.node, reason, alive))
    stop_suspecting(gang_turn.observed, member.node)


def fence_generation(
    gang_turn: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "", crashed_on: str = ""
) -> None:
    """Order every rank of the running generation ended."""
    gang = gang_turn.gang
    step = max(
        gang_turn.observed.step_number, gang.restored_version.step if gang.restored_version else 0
    )  # its first report may not have come yet
    store = choose_store_node(gang_turn, not_on)
    gang_turn.turn.record(
        facts.GenerationFenced(gang.id, gang.generation, cause, hardware, store, step, suspected_at, crashed_on)
    )


def choose_store_node(gang_turn: GangTurn, not_on: str = "") -> str:
    """Who shall open the next rendezvous store: the first seat that is in touch, else any member that is."""
    seats = [seat.node for seat in gang_turn.gang.seats]
    usable = [m.node for m in gang_turn.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gang_turn.observed.is_attached(n) and n not in gang_turn.observed.suspected_since]
    return next(iter(touch or order), "")
