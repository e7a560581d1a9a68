"""Suspicion: who is asked after, and what the answers lead to.

A suspicion arises from an accusation, a stream that ended, or a fence that is not answered. It leads to a round of
probes and to nothing else; only the finding of a round (`verdict`) takes a node from its gang.
"""

from muster.daemon.coordinator.core.detection import circuit_breaker, outage, progress_timeouts
from muster.daemon.coordinator.core.detection.probe_result import Finding, find
from muster.daemon.coordinator.core.detection.progress_timeouts import HOLD_S, OUT_OF_TOUCH_S
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state import placement
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.gang_index import silent_neighbours
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD, Probe, clear, forget
from muster.daemon.coordinator.core.state.state_tables import FENCING, WATCHED, Phase, Verdict
from muster.daemon.coordinator.core.state.turn import Ask, GangTurn

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


def examine(gt: GangTurn) -> None:
    """Raise suspicions that the phase gives rise to, judge finished rounds, ask anew where that is due."""
    if gt.gang.phase not in WATCHED:
        return
    if gt.turn.about is not None and _may_be_taken(gt, gt.turn.about):
        gt.turn.about = None  # who else is silent by now counts
    suspected, about = gt.seen.suspected, gt.turn.about
    looked_at = suspected.keys() if about is None else suspected.keys() & {about}
    for gone in looked_at - gt.tally.expected:
        forget(gt.seen, gone)
    pending = _suspect_unheard(gt) | (_lacking(gt) if about is None else {about})
    members = [gt.gang.members[node] for node in sorted(pending & gt.tally.expected)]
    for member in members:  # all of them before anybody is judged: whether many are silent at once decides
        _suspect_unattached(gt, member)
        _suspect_unfenced(gt, member)
    for member in members:
        if member.node in suspected:
            _judge(gt, member)
        if member.node in suspected:
            _ask(gt, member)
    if suspected:
        gt.turn.wake(gt.now + 0.05)


def _may_be_taken(gt: GangTurn, node: str) -> bool:
    """All witnesses find it silent, and it is not known yet that too many are."""
    probe = gt.seen.probes.get(node)
    silent = probe is not None and find(probe, gt.seen.moved_at) in (Finding.HUNG, Finding.LOST)
    return silent and len(gt.seen.suspected) <= outage.few(gt)


def _lacking(gt: GangTurn) -> set[str]:
    """Who may have to be asked after, whatever the event told of."""
    return gt.tally.unattached | gt.seen.suspected.keys() | _late(gt) | _mute(gt)


def _late(gt: GangTurn) -> set[str]:
    """Who might have answered the fence by now and did not, or opened no store."""
    gang, unfenced = gt.gang, gt.tally.unfenced
    if gang.phase not in FENCING or (not unfenced and gt.store_listens()):
        return set()
    gt.turn.wake(gt.now + 0.05)
    early = gt.now - max(gang.phase_at, gt.turn.sight.since) <= ANSWER_FENCE_S
    return set() if early else {*unfenced, gang.store_node}


def _mute(gt: GangTurn) -> set[str]:
    """Whose stream is open and brings nothing. All are looked at only when the first of them may be overdue."""
    tally = gt.tally
    overdue = set()
    if gt.now >= tally.lease_at:
        since = {node: _in_touch_at(gt, node) for node in tally.expected - tally.unattached}
        overdue = {node for node, at in since.items() if gt.now - at >= LEASE_S}
        tally.lease_at = min((at for node, at in since.items() if node not in overdue), default=gt.now) + LEASE_S
    gt.turn.wake(tally.lease_at)
    return overdue


def _in_touch_at(gt: GangTurn, node: str) -> float:
    """When an agent whose stream is open was last heard, or cleared."""
    return max(gt.turn.sight.heard_at(gt.gang.id, node), gt.seen.cleared_at.get(node, 0.0))


def ended(gt: GangTurn, member: Member) -> bool:
    """No rank of the fenced generation runs on it: its agent says so, or only the kernel still has it."""
    return gt.fenced(member.node) or (bool(member.out) and _outlives_kill(gt, member))


def _outlives_kill(gt: GangTurn, member: Member) -> bool:
    """It has surely had the fence for so long: its stream is open and the coordinator's own probes get through."""
    agent = gt.seen.agents.get(member.node)
    reached, reached_at = gt.seen.own_probes.get(member.node, (False, gt.now))
    if agent is None or not agent.attached or not reached:
        return False
    since = max(gt.gang.phase_at, gt.turn.sight.since)  # what came while the coordinator stood still is unread yet
    return gt.now - max(since, agent.attached_at, reached_at) > KILL_S


def _suspect_unheard(gt: GangTurn) -> set[str]:
    """A neighbour's silence stands in its watchers' statuses too: an accusation survives a coordinator's restart.

    Returns: who is suspected by that, as of now.
    """
    tally, about, seen = gt.tally, gt.turn.about, gt.seen
    unheard = set()
    for watcher in sorted(tally.watchers if about is None else tally.watchers & {about}):
        agent = seen.agents[watcher]
        for node in silent_neighbours(tally.seats[watcher], agent.status):
            if node in tally.present and agent.reported_at > seen.cleared_at.get(node, 0.0):
                unheard.add(node)
                seen.suspected.setdefault(node, agent.reported_at)
    return unheard


def _suspect_unattached(gt: GangTurn, member: Member) -> None:
    """An agent that is out of touch for longer than attaching anew takes is asked after; so is one whose stream is
    open and brings nothing: a node that loses power closes no stream."""
    agent = gt.seen.agents.get(member.node)
    if agent and agent.attached:
        since, patience = _in_touch_at(gt, member.node), LEASE_S
    else:
        since = max(gt.turn.sight.since, gt.seen.cleared_at.get(member.node, 0.0), agent.gone_at if agent else 0.0)
        patience = REATTACH_S
    if gt.now - since >= patience:
        gt.seen.suspected.setdefault(member.node, gt.now)
    else:
        gt.turn.wake(since + patience)


def _suspect_unfenced(gt: GangTurn, member: Member) -> None:
    fenced = gt.fenced(member.node)
    if gt.gang.phase not in FENCING or (fenced and (member.node != gt.gang.store_node or gt.store_listens())):
        return
    asked_at = max(gt.gang.phase_at, gt.turn.sight.since, gt.seen.cleared_at.get(member.node, 0.0))
    if fenced:
        asked_at = max(asked_at, gt.gang.store_at)  # only the store is missing
    gt.turn.wake(gt.now + 0.05)
    if gt.now - asked_at > ANSWER_FENCE_S and member.node not in gt.seen.suspected:
        gt.seen.suspected[member.node] = asked_at
    if not fenced and not member.out and _outlives_kill(gt, member) and not _is_held(gt):
        reason = f"ranks on {member.node} could not be killed within {KILL_S:.0f} s"
        _take(gt, member, Verdict.UNFIT, reason)


def _is_held(gt: GangTurn) -> bool:
    """Nobody is to blame for ranks that can't be killed before a minute has passed, where many can't."""
    since, sight = max(gt.gang.phase_at, gt.turn.sight.since), gt.turn.sight
    if outage.many_stuck(gt):
        sight.stuck_at = gt.now
    # What held them all lets go of one after another.
    return gt.now - since < HOLD_S and gt.now - sight.stuck_at < outage.LATE_S


def _judge(gt: GangTurn, member: Member) -> None:
    probe = gt.seen.probes.get(member.node)
    if probe is None:
        return
    finding = find(probe, gt.seen.moved_at)
    if finding in (Finding.HUNG, Finding.LOST) and not _witnessed(gt, member, probe):
        _follow_slurm(gt, member)
        return
    if finding is Finding.HUNG:
        gt.seen.hanging.setdefault(member.node, probe.asked_at)
    elif finding is not Finding.OPEN:
        gt.seen.hanging.pop(member.node, None)
    if finding in (Finding.HUNG, Finding.AGENT_MUTE) and progress_timeouts.moves(gt, member):
        finding = Finding.OPEN
    match finding:
        case Finding.ALIVE:
            _alive(gt, member)
        case Finding.AGENT_ENDED:
            remove(gt, member, f"muster-agent on {member.node} has ended", alive=False)
        case Finding.AGENT_MUTE:
            if gt.now - gt.seen.suspected[member.node] > MUTE_S:
                remove(gt, member, f"muster-agent on {member.node} does not answer", alive=False)
        case Finding.HUNG if probe.asked_at - gt.seen.hanging[member.node] >= HUNG_S:
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_unless_many(gt, member, Verdict.HUNG, reason)
        case Finding.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_unless_many(gt, member, Verdict.LOST, reason)
        case Finding.OPEN if _is_missed(gt, member, probe):
            reason = f"{member.node}, which carries no rank, has not answered anybody for {HOLD_S:.0f} s"
            remove(gt, member, reason, alive=False)
        case Finding.HUNG | Finding.OPEN:
            pass


def _is_missed(gt: GangTurn, member: Member, probe: Probe) -> bool:
    """The gang's steps do not speak for a member without a seat. It gets no verdict while there are any, but it is not
    counted on for ever: a recovery would wait for it."""
    seat = gt.tally.seats.get(member.node)
    if (seat is not None and seat.group_rank >= 0) or gt.now - gt.seen.suspected[member.node] < HOLD_S:
        return False
    return find(probe, moved_at=0.0) not in (Finding.ALIVE, Finding.OPEN) and _witnessed(gt, member, probe)


def _witnessed(gt: GangTurn, member: Member, probe: Probe) -> bool:
    """Besides the coordinator two other agents have found it silent. Where fewer are left that can be asked, one will
    do, after the longest wait: the coordinator's word alone never does, for its own link may be what is cut."""
    others = len(gt.tally.present) - 1
    asked = len(gt.tally.present.intersection(probe.witnesses))  # who has gone out since is no witness
    if asked >= min(2, others) > 0:
        return True
    return asked > 0 and gt.now - gt.seen.suspected[member.node] >= HOLD_S


def _follow_slurm(gt: GangTurn, member: Member) -> None:
    """Nobody is left to ask: who is silent and no longer in the job has been given up by Slurm. A node of the shared
    pool, whose small job nobody looks at, is given up when Slurm has it down."""
    if member.job == gt.gang.job:
        taken = bool(gt.gang.job_nodes) and member.node not in gt.gang.job_nodes
    else:
        taken = gt.turn.sight.node(member.node).down
    if taken or gt.requeued or gt.job_ended:
        remove(gt, member, f"{member.node} is silent, and Slurm has taken it out of the job", alive=False)


def _alive(gt: GangTurn, member: Member) -> None:
    """It answered somebody. That clears it; should it not be in touch with the coordinator it is asked after again."""
    away_s = gt.now - _out_of_touch_since(gt, member)
    if away_s >= OUT_OF_TOUCH_S and _keeps_waiting(gt, member, away_s):
        reason = f"{member.node} answers others, but the coordinator has not reached it for {away_s:.0f} s"
        remove(gt, member, reason, alive=False)
        return
    clear(gt.seen, member.node, gt.now)
    if not gt.seen.attached(member.node):
        gt.turn.wake(gt.now + ANSWER_FENCE_S)


def _keeps_waiting(gt: GangTurn, member: Member, away_s: float) -> bool:
    """Its gang can't go on without its word: its fence, its knowledge of who is out, a step. And none will come."""
    if gt.gang.phase in FENCING:
        return not ended(gt, member) or gt.seen.status(member.node).order_serial < gt.gang.serial
    return min(away_s, gt.now - progress_timeouts.went_on_at(gt)) >= progress_timeouts.without_s(gt, member)


def _out_of_touch_since(gt: GangTurn, member: Member) -> float:
    """Since when it does not hear the coordinator, or is not heard by it; now, where neither is known."""
    began = max(gt.gang.phase_at, gt.turn.sight.since)
    heard_at = gt.turn.sight.heard_at(gt.gang.id, member.node)
    reached, since = gt.seen.own_probes.get(member.node, (True, gt.now))
    return max(began, min(heard_at, gt.now if reached else since))


def _ask(gt: GangTurn, member: Member) -> None:
    probe = gt.seen.probes.get(member.node)
    closed = member.node in gt.seen.closed
    if probe is not None:
        deadline = CLOSED_PROBE_S if closed else PROBE_S
        spent = gt.now - probe.asked_at
        if spent < deadline + SLACK_S and not (probe.complete and spent > deadline):
            return
        for mute in (w for w in probe.witnesses if w not in probe.silences and w not in (AGENT, MUSTERD)):
            gt.seen.suspected.setdefault(mute, gt.now)  # a witness that does not answer is asked after itself
    _send(gt, member, CLOSED_PROBE_S if closed else PROBE_S)


def _send(gt: GangTurn, member: Member, deadline_s: float) -> None:
    away, suspected = gt.tally.unattached, gt.seen.suspected
    candidates = (m for m in gt.tally.by_fabric(gt.gang) if m.node not in away and m.node not in suspected)
    others = placement.witnesses(candidates, member.node, member.leaf, 2)
    gt.turn.sight.probes += 1
    number = gt.turn.sight.probes
    asked = (AGENT, MUSTERD, *others)
    gt.seen.probes[member.node] = Probe(number, member.node, asked, gt.now)
    address = gt.turn.ledger.node(member.node).probe_address
    gt.turn.outcome.asks.append(Ask(number, gt.gang.id, member.node, asked, member.peer_address, address, deadline_s))


def _take_unless_many(gt: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    """Many nodes silent at once may be the observer's own trouble: hold until the suspicion is a minute old."""
    if gt.now - gt.seen.suspected[member.node] < HOLD_S and outage.many_silent(gt):
        gt.turn.wake(gt.now + 1.0)
        return
    _take(gt, member, verdict, reason)


def _take(gt: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    circuit_breaker.take(gt.turn, gt.gang, member.node, verdict, reason)
    remove(gt, member, reason, alive=verdict is Verdict.UNFIT)


def remove(gt: GangTurn, member: Member, reason: str, alive: bool) -> None:
    """Take a member out of its gang; where it carries ranks of a live generation, that generation is fenced first."""
    suspected = gt.seen.suspected.get(member.node, gt.now)
    carries = any(seat.node == member.node for seat in gt.gang.seats)
    if carries and gt.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence(gt, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gt.turn.record(f.MemberOut(gt.gang.id, member.node, reason, alive))
    forget(gt.seen, member.node)


def fence(
    gt: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "", crashed_on: str = ""
) -> None:
    """Order every rank of the running generation ended."""
    gang = gt.gang
    step = max(gt.seen.step, gang.version.step if gang.version else 0)  # its first report may not have come yet
    store = store_node(gt, not_on)
    gt.turn.record(f.GenerationFenced(gang.id, gang.generation, cause, hardware, store, step, suspected_at, crashed_on))


def store_node(gt: GangTurn, not_on: str = "") -> str:
    """Who shall open the next rendezvous store: the first seat that is in touch, else any member that is."""
    seats = [seat.node for seat in gt.gang.seats]
    usable = [m.node for m in gt.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gt.seen.attached(n) and n not in gt.seen.suspected]
    return next(iter(touch or order), "")
