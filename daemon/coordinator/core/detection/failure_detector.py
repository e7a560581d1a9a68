"""Suspicion: who is asked after, and what the answers lead to.

A suspicion arises from an accusation, a stream that ended, or a fence that is not answered. It leads to a round of
probes and to nothing else; only the finding of a round (`verdict`) takes a node from its gang.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker, outage, progress_timeouts
from muster.daemon.coordinator.core.detection.probe_result import Finding, find
from muster.daemon.coordinator.core.detection.progress_timeouts import HOLD_S, OUT_OF_TOUCH_S
from muster.daemon.coordinator.core.state import facts, placement
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.gang_index import silent_neighbours
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD, Probe, clear, forget
from muster.daemon.coordinator.core.state.state_tables import FENCING, WATCHED, Phase, Verdict
from muster.daemon.coordinator.core.state.turn import GangTurn, ProbeRequest

PROBE_S = 0.75
"""Deadline of a probe. A loaded but fit node answers within it; it is part of every detection of a silent node."""
CLOSED_PROBE_S = 0.4
"""Deadline where the node's own kernel has closed the agent's connections: the probes only confirm."""
SLACK_S = 0.35
"""How long after the deadline a witness's answer may arrive before the round is given up and others are asked."""
HUNG_S = 4.0
"""Processes of a fit node that get no processor, or wait for memory, answer again after seconds. So a node is hung only
where rounds of probes have found nothing but its kernel for so long: the last began this long after the first."""
ANSWER_FENCE_S = 0.4
"""A fence is answered within this by an agent that can; later, its node is probed."""
LEASE_S = 11.0
"""An agent pings every 5 s: two that did not come, and a margin. Neighbours are faster, where there are any left."""
REATTACH_S = 5.0
"""An agent attaches anew within this, after its stream broke or the coordinator was restarted."""
KILL_S = 10.0
"""A rank that can't be killed in this time makes its node UNFIT."""
MUTE_S = 10.0
"""An agent that stays mute this long while its node's daemon answers gives up its place."""


def examine(gang_turn: GangTurn) -> None:
    """Raise suspicions that the phase gives rise to, judge finished rounds, ask anew where that is due."""
    if gang_turn.gang.phase not in WATCHED:
        return
    if gang_turn.turn.about is not None and _may_be_taken(gang_turn, gang_turn.turn.about):
        gang_turn.turn.about = None  # who else is silent by now counts
    suspected, about = gang_turn.seen.suspected, gang_turn.turn.about
    looked_at = suspected.keys() if about is None else suspected.keys() & {about}
    for gone in looked_at - gang_turn.index.expected:
        forget(gang_turn.seen, gone)
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
        gang_turn.turn.wake(gang_turn.now + 0.05)


def _may_be_taken(gang_turn: GangTurn, node: str) -> bool:
    """All witnesses find it silent, and it is not known yet that too many are."""
    probe = gang_turn.seen.probes.get(node)
    silent = probe is not None and find(probe, gang_turn.seen.moved_at) in (Finding.HUNG, Finding.LOST)
    return silent and len(gang_turn.seen.suspected) <= outage.few(gang_turn)


def _lacking(gang_turn: GangTurn) -> set[str]:
    """Who may have to be asked after, whatever the event told of."""
    return gang_turn.index.unattached | gang_turn.seen.suspected.keys() | _late(gang_turn) | _mute(gang_turn)


def _late(gang_turn: GangTurn) -> set[str]:
    """Who might have answered the fence by now and did not, or opened no store."""
    gang, unfenced = gang_turn.gang, gang_turn.index.unfenced
    if gang.phase not in FENCING or (not unfenced and gang_turn.store_listens()):
        return set()
    gang_turn.turn.wake(gang_turn.now + 0.05)
    early = gang_turn.now - max(gang.phase_at, gang_turn.turn.observed.since) <= ANSWER_FENCE_S
    return set() if early else {*unfenced, gang.store_node}


def _mute(gang_turn: GangTurn) -> set[str]:
    """Whose stream is open and brings nothing. All are looked at only when the first of them may be overdue."""
    index = gang_turn.index
    overdue = set()
    if gang_turn.now >= index.lease_at:
        since = {node: _in_touch_at(gang_turn, node) for node in index.expected - index.unattached}
        overdue = {node for node, at in since.items() if gang_turn.now - at >= LEASE_S}
        index.lease_at = min((at for node, at in since.items() if node not in overdue), default=gang_turn.now) + LEASE_S
    gang_turn.turn.wake(index.lease_at)
    return overdue


def _in_touch_at(gang_turn: GangTurn, node: str) -> float:
    """When an agent whose stream is open was last heard, or cleared."""
    return max(gang_turn.turn.observed.heard_at(gang_turn.gang.id, node), gang_turn.seen.cleared_at.get(node, 0.0))


def ended(gang_turn: GangTurn, member: Member) -> bool:
    """No rank of the fenced generation runs on it: its agent says so, or only the kernel still has it."""
    return gang_turn.fenced(member.node) or (bool(member.out) and _outlives_kill(gang_turn, member))


def _outlives_kill(gang_turn: GangTurn, member: Member) -> bool:
    """It has surely had the fence for so long: its stream is open and the coordinator's own probes get through."""
    agent = gang_turn.seen.agents.get(member.node)
    reached, reached_at = gang_turn.seen.own_probes.get(member.node, (False, gang_turn.now))
    if agent is None or not agent.attached or not reached:
        return False
    since = max(
        gang_turn.gang.phase_at, gang_turn.turn.observed.since
    )  # what came while the coordinator stood still is unread yet
    return gang_turn.now - max(since, agent.attached_at, reached_at) > KILL_S


def _suspect_unheard(gang_turn: GangTurn) -> set[str]:
    """A neighbour's silence stands in its watchers' statuses too: an accusation survives a coordinator's restart.

    Returns: who is suspected by that, as of now.
    """
    index, about, seen = gang_turn.index, gang_turn.turn.about, gang_turn.seen
    unheard = set()
    for watcher in sorted(index.watchers if about is None else index.watchers & {about}):
        agent = seen.agents[watcher]
        for node in silent_neighbours(index.seats[watcher], agent.status):
            if node in index.present and agent.reported_at > seen.cleared_at.get(node, 0.0):
                unheard.add(node)
                seen.suspected.setdefault(node, agent.reported_at)
    return unheard


def _suspect_unattached(gang_turn: GangTurn, member: Member) -> None:
    """An agent that is out of touch for longer than attaching anew takes is asked after; so is one whose stream is
    open and brings nothing: a node that loses power closes no stream."""
    agent = gang_turn.seen.agents.get(member.node)
    if agent and agent.attached:
        since, patience = _in_touch_at(gang_turn, member.node), LEASE_S
    else:
        since = max(
            gang_turn.turn.observed.since,
            gang_turn.seen.cleared_at.get(member.node, 0.0),
            agent.gone_at if agent else 0.0,
        )
        patience = REATTACH_S
    if gang_turn.now - since >= patience:
        gang_turn.seen.suspected.setdefault(member.node, gang_turn.now)
    else:
        gang_turn.turn.wake(since + patience)


def _suspect_unfenced(gang_turn: GangTurn, member: Member) -> None:
    fenced = gang_turn.fenced(member.node)
    if gang_turn.gang.phase not in FENCING or (
        fenced and (member.node != gang_turn.gang.store_node or gang_turn.store_listens())
    ):
        return
    asked_at = max(
        gang_turn.gang.phase_at, gang_turn.turn.observed.since, gang_turn.seen.cleared_at.get(member.node, 0.0)
    )
    if fenced:
        asked_at = max(asked_at, gang_turn.gang.store_at)  # only the store is missing
    gang_turn.turn.wake(gang_turn.now + 0.05)
    if gang_turn.now - asked_at > ANSWER_FENCE_S and member.node not in gang_turn.seen.suspected:
        gang_turn.seen.suspected[member.node] = asked_at
    if not fenced and not member.out and _outlives_kill(gang_turn, member) and not _is_held(gang_turn):
        reason = f"ranks on {member.node} could not be killed within {KILL_S:.0f} s"
        _take(gang_turn, member, Verdict.UNFIT, reason)


def _is_held(gang_turn: GangTurn) -> bool:
    """Nobody is to blame for ranks that can't be killed before a minute has passed, where many can't."""
    since, observed = max(gang_turn.gang.phase_at, gang_turn.turn.observed.since), gang_turn.turn.observed
    if outage.many_stuck(gang_turn):
        observed.stuck_at = gang_turn.now
    # What held them all lets go of one after another.
    return gang_turn.now - since < HOLD_S and gang_turn.now - observed.stuck_at < outage.LATE_S


def _judge(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.seen.probes.get(member.node)
    if probe is None:
        return
    finding = find(probe, gang_turn.seen.moved_at)
    if finding in (Finding.HUNG, Finding.LOST) and not _witnessed(gang_turn, member, probe):
        _follow_slurm(gang_turn, member)
        return
    if finding is Finding.HUNG:
        gang_turn.seen.hanging.setdefault(member.node, probe.asked_at)
    elif finding is not Finding.OPEN:
        gang_turn.seen.hanging.pop(member.node, None)
    if finding in (Finding.HUNG, Finding.AGENT_MUTE) and progress_timeouts.moves(gang_turn, member):
        finding = Finding.OPEN
    match finding:
        case Finding.ALIVE:
            _alive(gang_turn, member)
        case Finding.AGENT_ENDED:
            remove(gang_turn, member, f"muster-agent on {member.node} has ended", alive=False)
        case Finding.AGENT_MUTE:
            if gang_turn.now - gang_turn.seen.suspected[member.node] > MUTE_S:
                remove(gang_turn, member, f"muster-agent on {member.node} does not answer", alive=False)
        case Finding.HUNG if probe.asked_at - gang_turn.seen.hanging[member.node] >= HUNG_S:
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_unless_many(gang_turn, member, Verdict.HUNG, reason)
        case Finding.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_unless_many(gang_turn, member, Verdict.LOST, reason)
        case Finding.OPEN if _is_missed(gang_turn, member, probe):
            reason = f"{member.node}, which carries no rank, has not answered anybody for {HOLD_S:.0f} s"
            remove(gang_turn, member, reason, alive=False)
        case Finding.HUNG | Finding.OPEN:
            pass


def _is_missed(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """The gang's steps do not speak for a member without a seat. It gets no verdict while there are any, but it is not
    counted on for ever: a recovery would wait for it."""
    seat = gang_turn.index.seats.get(member.node)
    if (seat is not None and seat.group_rank >= 0) or gang_turn.now - gang_turn.seen.suspected[member.node] < HOLD_S:
        return False
    return find(probe, moved_at=0.0) not in (Finding.ALIVE, Finding.OPEN) and _witnessed(gang_turn, member, probe)


def _witnessed(gang_turn: GangTurn, member: Member, probe: Probe) -> bool:
    """Besides the coordinator two other agents have found it silent. Where fewer are left that can be asked, one will
    do, after the longest wait: the coordinator's word alone never does, for its own link may be what is cut."""
    others = len(gang_turn.index.present) - 1
    asked = len(gang_turn.index.present.intersection(probe.witnesses))  # who has gone out since is no witness
    if asked >= min(2, others) > 0:
        return True
    return asked > 0 and gang_turn.now - gang_turn.seen.suspected[member.node] >= HOLD_S


def _follow_slurm(gang_turn: GangTurn, member: Member) -> None:
    """Nobody is left to ask: who is silent and no longer in the job has been given up by Slurm. A node of the shared
    pool, whose small job nobody looks at, is given up when Slurm has it down."""
    if member.job == gang_turn.gang.job:
        taken = bool(gang_turn.gang.job_nodes) and member.node not in gang_turn.gang.job_nodes
    else:
        taken = gang_turn.turn.observed.node(member.node).down
    if taken or gang_turn.requeued or gang_turn.job_ended:
        remove(gang_turn, member, f"{member.node} is silent, and Slurm has taken it out of the job", alive=False)


def _alive(gang_turn: GangTurn, member: Member) -> None:
    """It answered somebody. That clears it; should it not be in touch with the coordinator it is asked after again."""
    away_s = gang_turn.now - _out_of_touch_since(gang_turn, member)
    if away_s >= OUT_OF_TOUCH_S and _keeps_waiting(gang_turn, member, away_s):
        reason = f"{member.node} answers others, but the coordinator has not reached it for {away_s:.0f} s"
        remove(gang_turn, member, reason, alive=False)
        return
    clear(gang_turn.seen, member.node, gang_turn.now)
    if not gang_turn.seen.attached(member.node):
        gang_turn.turn.wake(gang_turn.now + ANSWER_FENCE_S)


def _keeps_waiting(gang_turn: GangTurn, member: Member, away_s: float) -> bool:
    """Its gang can't go on without its word: its fence, its knowledge of who is out, a step. And none will come."""
    if gang_turn.gang.phase in FENCING:
        return not ended(gang_turn, member) or gang_turn.seen.status(member.node).order_serial < gang_turn.gang.serial
    return min(away_s, gang_turn.now - progress_timeouts.went_on_at(gang_turn)) >= progress_timeouts.without_s(
        gang_turn, member
    )


def _out_of_touch_since(gang_turn: GangTurn, member: Member) -> float:
    """Since when it does not hear the coordinator, or is not heard by it; now, where neither is known."""
    began = max(gang_turn.gang.phase_at, gang_turn.turn.observed.since)
    heard_at = gang_turn.turn.observed.heard_at(gang_turn.gang.id, member.node)
    reached, since = gang_turn.seen.own_probes.get(member.node, (True, gang_turn.now))
    return max(began, min(heard_at, gang_turn.now if reached else since))


def _ask(gang_turn: GangTurn, member: Member) -> None:
    probe = gang_turn.seen.probes.get(member.node)
    closed = member.node in gang_turn.seen.closed
    if probe is not None:
        deadline = CLOSED_PROBE_S if closed else PROBE_S
        spent = gang_turn.now - probe.asked_at
        if spent < deadline + SLACK_S and not (probe.complete and spent > deadline):
            return
        for mute in (w for w in probe.witnesses if w not in probe.silences and w not in (AGENT, MUSTERD)):
            gang_turn.seen.suspected.setdefault(
                mute, gang_turn.now
            )  # a witness that does not answer is asked after itself
    _send(gang_turn, member, CLOSED_PROBE_S if closed else PROBE_S)


def _send(gang_turn: GangTurn, member: Member, deadline_s: float) -> None:
    away, suspected = gang_turn.index.unattached, gang_turn.seen.suspected
    candidates = (
        m for m in gang_turn.index.by_fabric(gang_turn.gang) if m.node not in away and m.node not in suspected
    )
    others = placement.witnesses(candidates, member.node, member.leaf, 2)
    gang_turn.turn.observed.probes += 1
    number = gang_turn.turn.observed.probes
    asked = (AGENT, MUSTERD, *others)
    gang_turn.seen.probes[member.node] = Probe(number, member.node, asked, gang_turn.now)
    address = gang_turn.turn.state.node(member.node).probe_address
    gang_turn.turn.outcome.asks.append(
        ProbeRequest(number, gang_turn.gang.id, member.node, asked, member.peer_address, address, deadline_s)
    )


def _take_unless_many(gang_turn: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    """Many nodes silent at once may be the observer's own trouble: hold until the suspicion is a minute old."""
    if gang_turn.now - gang_turn.seen.suspected[member.node] < HOLD_S and outage.many_silent(gang_turn):
        gang_turn.turn.wake(gang_turn.now + 1.0)
        return
    _take(gang_turn, member, verdict, reason)


def _take(gang_turn: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    circuit_breaker.take(gang_turn.turn, gang_turn.gang, member.node, verdict, reason)
    remove(gang_turn, member, reason, alive=verdict is Verdict.UNFIT)


def remove(gang_turn: GangTurn, member: Member, reason: str, alive: bool) -> None:
    """Take a member out of its gang; where it carries ranks of a live generation, that generation is fenced first."""
    suspected = gang_turn.seen.suspected.get(member.node, gang_turn.now)
    carries = any(seat.node == member.node for seat in gang_turn.gang.seats)
    if carries and gang_turn.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence(gang_turn, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gang_turn.turn.record(facts.MemberOut(gang_turn.gang.id, member.node, reason, alive))
    forget(gang_turn.seen, member.node)


def fence(
    gang_turn: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "", crashed_on: str = ""
) -> None:
    """Order every rank of the running generation ended."""
    gang = gang_turn.gang
    step = max(gang_turn.seen.step, gang.version.step if gang.version else 0)  # its first report may not have come yet
    store = store_node(gang_turn, not_on)
    gang_turn.turn.record(
        facts.GenerationFenced(gang.id, gang.generation, cause, hardware, store, step, suspected_at, crashed_on)
    )


def store_node(gang_turn: GangTurn, not_on: str = "") -> str:
    """Who shall open the next rendezvous store: the first seat that is in touch, else any member that is."""
    seats = [seat.node for seat in gang_turn.gang.seats]
    usable = [m.node for m in gang_turn.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gang_turn.seen.attached(n) and n not in gang_turn.seen.suspected]
    return next(iter(touch or order), "")
