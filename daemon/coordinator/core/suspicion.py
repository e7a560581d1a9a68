"""Suspicion: who is asked after, and what the answers lead to.

A suspicion arises from an accusation, a stream that ended, or a fence that is not answered. It leads to a round of
probes and to nothing else; only the finding of a round (`verdict`) takes a node from its gang.
"""

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core import placement
from muster.daemon.coordinator.core.ledger import Member
from muster.daemon.coordinator.core.sight import Probe, clear
from muster.daemon.coordinator.core.states import Phase, Verdict
from muster.daemon.coordinator.core.tally import silent_neighbours
from muster.daemon.coordinator.core.turn import Ask, GangTurn
from muster.daemon.coordinator.core.verdict import AGENT, MUSTERD, Finding, find

PROBE_S = 0.75
"""Deadline of a probe. A loaded but fit node answers within it; it is part of every detection of a silent node."""
CLOSED_PROBE_S = 0.4
"""Deadline where the node's own kernel has closed the agent's connections: the probes only confirm."""
SLACK_S = 0.35
"""How long after the deadline a witness's answer may arrive before the round is given up and others are asked."""
ANSWER_FENCE_S = 0.4
"""A fence is answered within this by an agent that can; later, its node is probed."""
REATTACH_S = 5.0
"""An agent attaches anew within this, after its stream broke or the coordinator was restarted."""
KILL_S = 10.0
"""A rank that can't be killed in this time makes its node UNFIT."""
MUTE_S = 10.0
"""An agent that stays mute this long while its node's daemon answers gives up its place."""
HOLD_S = 60.0
"""Longest wait for a cause when many nodes fall silent at once."""
MANY_WINDOW_S = 10.0
"""Two leases: nodes that fall silent within this count as falling silent at once."""

FENCING = frozenset({Phase.PREFLIGHT, Phase.RECOVERING})
ACTIVE = FENCING | {Phase.STARTING, Phase.RUNNING}


def examine(gt: GangTurn) -> None:
    """Raise suspicions that the phase gives rise to, judge finished rounds, ask anew where that is due."""
    if gt.gang.phase not in ACTIVE:
        return
    if gt.turn.about is None:
        for gone in gt.seen.suspected.keys() - gt.tally.present:
            gt.seen.suspected.pop(gone)
    _suspect_unheard(gt)
    for member in _pending(gt):
        _suspect_unattached(gt, member)
        _suspect_unfenced(gt, member)
        if member.node in gt.seen.suspected:
            _judge(gt, member)
        if member.node in gt.seen.suspected and not member.out:
            _ask(gt, member)
    if gt.seen.suspected:
        gt.turn.wake(gt.now + 0.05)


def _pending(gt: GangTurn) -> list[Member]:
    """Who may have to be asked after, by name: the node that the event is about, or everyone who lacks something."""
    nodes = _lacking(gt) if gt.turn.about is None else {gt.turn.about}
    return [gt.gang.members[node] for node in sorted(nodes & gt.tally.present)]


def _lacking(gt: GangTurn) -> set[str]:
    return gt.tally.unattached | gt.seen.suspected.keys() | _late(gt)


def _late(gt: GangTurn) -> set[str]:
    """Members that might have answered the fence by now and didn't, or opened no store."""
    gang, unfenced = gt.gang, gt.tally.unfenced
    if gang.phase not in FENCING or (not unfenced and gt.store_listens()):
        return set()
    gt.turn.wake(gt.now + 0.05)
    early = gt.now - max(gang.phase_at, gt.turn.sight.since) <= ANSWER_FENCE_S
    return set() if early else {*unfenced, gang.store_node}


def _suspect_unheard(gt: GangTurn) -> None:
    """A neighbour's silence stands in its watchers' statuses too: an accusation survives a coordinator's restart."""
    about, tally = gt.turn.about, gt.tally
    for watcher in sorted(tally.watchers if about is None else tally.watchers & {about}):
        agent = gt.seen.agents[watcher]
        for node in silent_neighbours(tally.seats[watcher], agent.status):
            if node in tally.present and agent.reported_at > gt.seen.cleared_at.get(node, 0.0):
                gt.seen.suspected.setdefault(node, agent.reported_at)


def _suspect_unattached(gt: GangTurn, member: Member) -> None:
    """An agent that is out of touch for longer than attaching anew takes is asked after."""
    agent = gt.seen.agents.get(member.node)
    if agent and agent.attached:
        return
    since = max(gt.turn.sight.since, agent.gone_at if agent else 0.0, gt.seen.cleared_at.get(member.node, 0.0))
    if gt.now - since >= REATTACH_S:
        gt.seen.suspected.setdefault(member.node, gt.now)
    else:
        gt.turn.wake(since + REATTACH_S)


def _suspect_unfenced(gt: GangTurn, member: Member) -> None:
    fenced = gt.fenced(member.node)
    if gt.gang.phase not in FENCING or (fenced and (member.node != gt.gang.store_node or gt.store_listens())):
        return
    asked_at = max(gt.gang.phase_at, gt.turn.sight.since, gt.seen.cleared_at.get(member.node, 0.0))
    gt.turn.wake(gt.now + 0.05)
    if gt.now - asked_at > ANSWER_FENCE_S and member.node not in gt.seen.suspected:
        gt.seen.suspected[member.node] = asked_at
    answers = gt.seen.attached(member.node) and gt.seen.cleared_at.get(member.node, 0.0) > gt.gang.phase_at
    if answers and not fenced and gt.now - gt.gang.phase_at > KILL_S:
        reason = f"ranks on {member.node} could not be killed within {KILL_S:.0f} s"
        _take(gt, member, Verdict.UNFIT, reason)


def _judge(gt: GangTurn, member: Member) -> None:
    probe = gt.seen.probes.get(member.node)
    if probe is None:
        return
    match find(probe, gt.seen.step):
        case Finding.ALIVE:
            _alive(gt, member)
        case Finding.AGENT_ENDED:
            remove(gt, member, f"muster-agent on {member.node} has ended", alive=False)
        case Finding.AGENT_MUTE:
            if gt.now - gt.seen.suspected[member.node] > MUTE_S:
                remove(gt, member, f"muster-agent on {member.node} does not answer", alive=False)
        case Finding.HUNG:
            reason = f"{member.node} hangs: its kernel answers, its processes don't"
            _take_unless_many(gt, member, Verdict.HUNG, reason)
        case Finding.LOST:
            reason = f"{member.node} is lost: agent and daemon silent to the coordinator and to other nodes"
            _take_unless_many(gt, member, Verdict.LOST, reason)
        case Finding.OPEN:
            pass


def _alive(gt: GangTurn, member: Member) -> None:
    """It answered somebody. That clears it; should it not be in touch with the coordinator it is asked after again."""
    clear(gt.seen, member.node, gt.now)
    if not gt.seen.attached(member.node):
        gt.turn.wake(gt.now + ANSWER_FENCE_S)


def _ask(gt: GangTurn, member: Member) -> None:
    probe = gt.seen.probes.get(member.node)
    closed = member.node in gt.seen.closed
    if probe is not None:
        deadline = CLOSED_PROBE_S if closed else PROBE_S
        spent = gt.now - probe.asked_at
        if spent < deadline + SLACK_S and not (probe.complete and spent > deadline):
            return
        for mute in set(probe.witnesses) - set(probe.silences) - {AGENT, MUSTERD}:
            gt.seen.suspected.setdefault(mute, gt.now)  # a witness that does not answer is asked after itself
    _send(gt, member, CLOSED_PROBE_S if closed else PROBE_S)


def _send(gt: GangTurn, member: Member, deadline_s: float) -> None:
    away, suspected = gt.tally.unattached, gt.seen.suspected
    candidates = (m for m in gt.tally.by_fabric(gt.gang) if m.node not in away and m.node not in suspected)
    others = placement.witnesses(candidates, member.node, member.leaf, 2)
    gt.turn.sight.probes += 1
    number = gt.turn.sight.probes
    asked = (AGENT, MUSTERD, *others)
    gt.seen.probes[member.node] = Probe(number, member.node, asked, gt.now, gt.seen.step)
    address = gt.turn.ledger.node(member.node).probe_address
    gt.turn.outcome.asks.append(Ask(number, gt.gang.id, member.node, asked, member.peer_address, address, deadline_s))


def _take_unless_many(gt: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    """Many nodes silent at once may be the observer's own trouble: hold until the suspicion is a minute old."""
    if gt.now - gt.seen.suspected[member.node] >= HOLD_S or not _many_silent(gt):
        _take(gt, member, verdict, reason)


def _many_silent(gt: GangTurn) -> bool:
    """Too many fell silent at once. Where that is so it is not counted again before the next tick."""
    tally = gt.tally
    if gt.now >= tally.many_until:
        known = max(len(gt.turn.ledger.nodes), len(gt.gang.members))
        if len(_silent(gt)) <= max(2, known // 10):
            return False
        tally.many_until = gt.now + 0.05
    return True


def _silent(gt: GangTurn) -> set[str]:
    """Nodes that nobody hears, or that were judged so just now."""
    step, out = gt.seen.step, [node for name in gt.turn.tallies.out if (node := gt.turn.ledger.nodes.get(name))]
    return {n for n, p in gt.seen.probes.items() if find(p, step) in (Finding.LOST, Finding.HUNG)} | {
        node.name
        for node in out
        if node.verdict in (Verdict.LOST, Verdict.HUNG) and gt.now - node.judged_at < MANY_WINDOW_S
    }


def _take(gt: GangTurn, member: Member, verdict: Verdict, reason: str) -> None:
    gt.turn.record(f.NodeJudged(member.node, verdict, reason))
    verb: f.SlurmVerb = "drain" if verdict is Verdict.UNFIT else "down"
    gt.turn.owe(verb, gt.gang.id, gt.gang.job, f"muster: {reason}", node=member.node)
    remove(gt, member, reason, alive=verdict is Verdict.UNFIT)


def remove(gt: GangTurn, member: Member, reason: str, alive: bool) -> None:
    """Take a member out of its gang; where it carries ranks of a live generation, that generation is fenced first."""
    suspected = gt.seen.suspected.get(member.node, gt.now)
    carries = any(seat.node == member.node for seat in gt.gang.seats)
    if carries and gt.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence(gt, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gt.turn.record(f.MemberOut(gt.gang.id, member.node, reason, alive))
    gt.seen.suspected.pop(member.node, None)
    gt.seen.probes.pop(member.node, None)


def fence(gt: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "") -> None:
    """Order every rank of the running generation ended."""
    gang = gt.gang
    gt.turn.record(
        f.GenerationFenced(
            gang.id, gang.generation, cause, hardware, store_node(gt, not_on), gt.seen.step, suspected_at
        )
    )


def store_node(gt: GangTurn, not_on: str = "") -> str:
    """Who shall open the next rendezvous store: the first seat that is in touch, else any member that is."""
    seats = [seat.node for seat in gt.gang.seats]
    usable = [m.node for m in gt.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gt.seen.attached(n) and n not in gt.seen.suspected]
    return next(iter(touch or order), "")
