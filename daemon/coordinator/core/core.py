"""The core: one event in, what follows from it out. See the package's docstring for the shape, ARCHITECTURE.md for the
steps of a recovery."""

from muster.daemon.coordinator.core.deadlines import Deadlines
from muster.daemon.coordinator.core.detection import circuit_breaker, correlated_faults, failure_detector
from muster.daemon.coordinator.core.recovery import gathering, shared_pool
from muster.daemon.coordinator.core.recovery.gang_end import EXIT_NO_NODES, end, end_as_slurm
from muster.daemon.coordinator.core.recovery.transitions import advance
from muster.daemon.coordinator.core.state import events as e
from muster.daemon.coordinator.core.state import facts as f
from muster.daemon.coordinator.core.state.durable_state import Gang, Ledger
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import Sight, observe
from muster.daemon.coordinator.core.state.state_index import Tallies
from muster.daemon.coordinator.core.state.state_tables import OUT_OF_SERVICE, RESUMABLE, SILENT, Phase, Verdict
from muster.daemon.coordinator.core.state.turn import GangTurn, Outcome, Turn

KEPT_S, KEPT = 7 * 86400.0, 1000
"""A gang that is over stays in the ledger for so long (seconds), while not so many newer ones are."""
CANCELLED = "Job is cancelled"
"""What the Slurm client says (refusals.CANCELLED) to a requeue where a user's scancel came between."""
ECHO = ""
"""Key of the deadlines that belong to no gang."""

_MOVES_NOBODY = e.AgentHeard | e.BatchHeard | e.NodeHeard | e.NodeGone
_ABOUT_A_NODE = e.AgentAttached | e.AgentGone | e.AgentReported | e.NeighbourAccused | e.Probed | e.NodeEvent


class Core:
    """Ledger and sight, and the decisions on them."""

    def __init__(self, ledger: Ledger, now: float, limits: Limits | None = None) -> None:
        """Take up where `ledger` ends, at time `now` (seconds); nothing is seen yet."""
        self.ledger = ledger
        self._limits = limits or Limits()
        self.sight = Sight(since=now)
        self.tallies = Tallies(ledger, self.sight)
        self._due = Deadlines()
        for gang in ledger.gangs.values():
            if not gang.final or gang.pool:
                self._due.set(gang.id, now)  # who does not come back after a restart has to be missed
        self._due.set(ECHO, correlated_faults.look_at(ledger, self.sight, now))

    def decide(self, event: e.Event, now: float) -> Outcome:
        """Note `event`, decide what follows, apply it to the ledger.

        Returns: the facts, to be journaled before anything is done about them; the probes to make; when to tick.
        """
        if isinstance(event, e.NeighbourAccused) and not self._is_member(event):
            return Outcome(due=self._due.nearest)  # whom nobody knows nobody would ever forget
        observe(self.sight, event, now)
        if isinstance(event, _MOVES_NOBODY) and not _returns(self.ledger, event):
            return Outcome(due=self._due.nearest)
        self.tallies.note(event)
        about = event.node if isinstance(event, _ABOUT_A_NODE) else None
        turn = Turn(self.ledger, self.sight, self.tallies, now, about, self._limits)
        _consequences(turn, event)
        for gang in self._touched(turn, event, now):
            turn.outcome.due = None
            advance(GangTurn(turn, gang))
            self._arm(gang, turn)
        if self.ledger.echoes and any(isinstance(fact, f.NodeJudged) for fact in turn.outcome.facts):
            correlated_faults.explain(turn)
        if self.ledger.echoes or self._due.get(ECHO) is not None:
            self._due.set(ECHO, correlated_faults.look_at(self.ledger, self.sight, now))
        turn.outcome.due = self._due.nearest
        return turn.outcome

    def may_leave(self, gang: Gang, job: int, restarts: int) -> bool:
        """The batch process of `job`, started when Slurm had restarted that so often, may end: its end is no reason to
        start the job again, or Slurm has put that run back into the queue and nobody needs it any more. One that stayed
        would hold its node, and so the next run, until Slurm kills it (KillWait, 30 s by default)."""
        if gang.outlived(job, restarts):
            return True
        if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED):
            seen = self.sight.gang(gang.id)
            return job == gang.job and seen.job_restarts > restarts and not seen.job_ended
        owed = self.ledger.owed.values()
        return gang.final and not any(call.gang == gang.id and call.verb == "requeue_off" for call in owed)

    def _is_member(self, event: e.NeighbourAccused) -> bool:
        gang = self.ledger.gangs.get(event.gang)
        return gang is not None and event.node in gang.members

    def _arm(self, gang: Gang, turn: Turn) -> None:
        due, before = turn.outcome.due, self._due.get(gang.id)
        if due is not None:
            due = max(due, turn.now + 0.005)  # a deadline of the past is due at the next turn
        if turn.about is not None and before is not None:
            due = before if due is None else min(due, before)  # only one node was looked at: the others' deadlines hold
        self._due.set(gang.id, due)

    def _touched(self, turn: Turn, event: e.Event, now: float) -> list[Gang]:
        """The gangs that this event may move."""
        gangs = self.ledger.gangs
        match event:
            case e.Tick():
                judged = [fact.node for fact in turn.outcome.facts if isinstance(fact, f.NodeJudged)]
                homes = [gang.id for node in judged for gang in self.tallies.homes(node)]
                return [gangs[g] for g in dict.fromkeys([*self._due.take(now), *homes]) if g in gangs]
            case e.NodeSeen():
                waiting = [gang for gang in gangs.values() if event.node in gang.excluded and not gang.final]
                return list({gang.id: gang for gang in (*self.tallies.homes(event.node), *waiting)}.values())
            case e.NodeAttached() | e.NodeSignalled() | e.NodeHeard() | e.NodeGone():
                return self.tallies.homes(event.node)
            case _:
                return [gangs[event.gang]] if event.gang in gangs else []


def _consequences(turn: Turn, event: e.Event) -> None:
    """Facts that follow from the event itself, whatever else is seen."""
    match event:
        case e.GangSubmitted():
            _submitted(turn, event)
        case e.AgentAttached():
            _attached(turn, event)
        case e.JobSeen():
            _job_seen(turn, event)
        case e.SlurmAnswered():
            _answered(turn, event)
        case e.NodeAttached() | e.NodeHeard() | e.NodeSignalled() | e.NodeSeen():
            _node(turn, event)
        case e.Tick() if turn.ledger.echoes:
            for node, reason in correlated_faults.own(turn):
                _unfit(turn, node, reason)
        case _:
            pass


def _submitted(turn: Turn, event: e.GangSubmitted) -> None:
    if event.gang not in turn.ledger.gangs:
        turn.record(f.GangRegistered(event.gang, event.job, event.owner_uid, event.name, event.spec, event.spec_json))
        _forget(turn)


def _forget(turn: Turn) -> None:
    """Let old gangs go. The ledger grows by submissions alone, so that is when."""
    owing = {call.gang for call in turn.ledger.owed.values()}
    over = [g for g in turn.ledger.gangs.values() if g.final and g.job_over and g.id not in owing]
    over.sort(key=lambda gang: gang.phase_at, reverse=True)
    for place, gang in enumerate(over):
        if place >= KEPT or turn.now - gang.phase_at > KEPT_S:
            turn.record(f.GangForgotten(gang.id))
            turn.sight.gangs.pop(gang.id, None)


def _job_seen(turn: Turn, event: e.JobSeen) -> None:
    gang = turn.ledger.gangs.get(event.gang)
    if gang is None:
        return
    if event.nodes and event.nodes != gang.job_nodes:
        turn.record(f.JobChanged(event.gang, event.nodes))
    if gang.final and event.ended and not gang.job_over:
        turn.record(f.JobOver(event.gang, event.ended))


def _attached(turn: Turn, event: e.AgentAttached) -> None:
    gang = turn.ledger.gangs.get(event.gang)
    if gang is None or gang.final:
        return
    if event.pool:
        _joins_from_pool(turn, gang, event)
        return
    if gang.outlived(event.job, event.restart_count):
        return  # an agent of a run that is over, whose admission took longer than the new run's first one
    if event.restart_count > gang.restart_count or event.job != gang.job:
        if gang.phase not in (Phase.REQUEUED, Phase.SUBMITTED):
            turn.record(f.PhaseChanged(gang.id, Phase.REQUEUED, "Slurm started the job again"))
        gathering.begin(GangTurn(turn, gang), event.job, event.restart_count)
    elif gang.phase is Phase.REQUEUED:
        return  # an agent of the run that is being ended
    _join(turn, gang, event)


def _joins_from_pool(turn: Turn, gang: Gang, event: e.AgentAttached) -> None:
    if shared_pool.refusal(gang, event.pool, event.job, event.node) or event.restart_count != gang.restart_count:
        return  # it will be cancelled
    if event.node in turn.tallies.out or gang.phase is Phase.REQUEUED:
        return  # the shell lets it in once Slurm is seen to have it in service
    if not gang.pool[event.pool].job:
        turn.record(f.PoolQueued(gang.id, event.pool, event.job))
    _join(turn, gang, event)


def _join(turn: Turn, gang: Gang, event: e.AgentAttached) -> None:
    if gang.phase is Phase.SUBMITTED:
        gathering.begin(GangTurn(turn, gang), gang.job, gang.restart_count)
    seen = turn.sight.gang(gang.id)
    seen.came_at = seen.came_at or turn.now
    member = gang.members.get(event.node)
    if member is not None and member.job != event.job:
        member = None  # it comes back from the pool, repaired
    if member is not None and (member.out or member.incarnation == event.incarnation):
        return
    if member is not None:
        seen.launched_at = turn.now
    carried = member is not None and any(s.node == event.node for s in gang.seats)
    if carried and gang.phase in (Phase.STARTING, Phase.RUNNING):
        gt = GangTurn(turn, gang)
        failure_detector.fence(gt, f"muster-agent on {event.node} was started anew", True, turn.now)
    turn.record(
        f.MemberJoined(
            gang.id,
            event.node,
            event.job,
            event.incarnation,
            event.peer_address,
            event.batch_host,
            event.leaf,
        )
    )


def _answered(turn: Turn, event: e.SlurmAnswered) -> None:
    owed = turn.ledger.owed.get(event.call)
    if owed is None:
        return
    turn.record(f.SlurmSettled(event.gang, event.call, event.error or ""))
    gang = turn.ledger.gangs.get(owed.gang)
    if owed.verb != "requeue" or not event.error or gang is None or not _waits_for_requeue(turn, gang):
        return
    if CANCELLED in event.error:
        end_as_slurm(GangTurn(turn, gang), "CANCELLED")
    else:
        end(GangTurn(turn, gang), Phase.FAILED, EXIT_NO_NODES, f"Slurm refused to requeue the job: {event.error}")


def _waits_for_requeue(turn: Turn, gang: Gang) -> bool:
    """Nothing but Slurm's answer brings its job back. Somebody else may have had it requeued meanwhile, or it may run
    again: then a refusal is of yesterday."""
    again = any(owed.gang == gang.id and owed.verb == "requeue" for owed in turn.ledger.owed.values())
    return gang.phase is Phase.REQUEUED and not GangTurn(turn, gang).requeued and not again


def _returns(ledger: Ledger, event: e.Event) -> bool:
    """The event is a sign of life of a node that was given up. Its stream may have outlived a short silence."""
    if not isinstance(event, e.NodeAttached | e.NodeHeard):
        return False
    return ledger.node(event.node).verdict in SILENT


def _node(turn: Turn, event: e.NodeAttached | e.NodeHeard | e.NodeSignalled | e.NodeSeen) -> None:
    node = turn.ledger.node(event.node)
    if _returns(turn.ledger, event):
        turn.record(f.NodeJudged(event.node, Verdict.RETURNING, "its daemon is heard again"))
    match event:
        case e.NodeAttached():
            if (node.boot_id, node.probe_address) != (event.boot_id, event.probe_address):
                turn.record(f.NodeRegistered(event.node, event.boot_id, event.probe_address))
        case e.NodeSignalled():
            _signalled(turn, event)
        case e.NodeSeen():
            pending = any(owed.node == event.node for owed in turn.ledger.owed.values())
            if event.in_service and not pending and node.verdict in RESUMABLE:
                turn.record(f.NodeJudged(event.node, Verdict.FIT, event.text))


def _signalled(turn: Turn, event: e.NodeSignalled) -> None:
    verdict = turn.ledger.node(event.node).verdict
    if verdict in OUT_OF_SERVICE:
        return
    if event.judgement == "unfit":
        _unfit(turn, event.node, event.reason)
    elif event.judgement == "echo":
        correlated_faults.heard(turn, event.node, event.reason)
    elif event.judgement == "degraded" and verdict is Verdict.FIT:
        turn.record(f.NodeJudged(event.node, Verdict.DEGRADED, event.reason))


def _unfit(turn: Turn, node: str, reason: str) -> None:
    held = circuit_breaker.hold(turn)
    if not held:
        circuit_breaker.take(turn, next(iter(turn.tallies.homes(node)), None), node, Verdict.UNFIT, reason)
    elif turn.ledger.node(node).verdict is Verdict.FIT:
        turn.record(f.NodeJudged(node, Verdict.DEGRADED, f"{reason}; it stays in service: {held}"))
