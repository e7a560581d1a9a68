"""The core: it takes one event, and returns the decisions that follow. The package's docstring gives the shape,
ARCHITECTURE.md the steps of a recovery."""

from muster.daemon.coordinator.core import drains, requested_swap, resuming
from muster.daemon.coordinator.core.deadlines import Deadlines
from muster.daemon.coordinator.core.detection import circuit_breaker, fencing, hardware_signals
from muster.daemon.coordinator.core.recovery import gathering
from muster.daemon.coordinator.core.recovery.gang_end import end_gang, end_gang_as_slurm
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import GANG_KEPT_S, GANGS_KEPT, Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedGang, ObservedState, observe
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.transitions import advance
from muster.daemon.coordinator.core.turn.communication import note_change
from muster.daemon.coordinator.core.turn.state_index import StateIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn, Outcome, Turn
from muster.exit_codes import EXIT_NO_NODES
from muster.node_health import RESUMABLE, UNRESPONSIVE, NodeHealth

CANCELLED = "Job is cancelled"
"""The words of the Slurm client (error_messages.CANCELLED) for a requeue that came after a user's scancel."""
CORRELATED_FAULTS = ""
"""Key of the deadline of undecided correlated faults, which belongs to no gang."""

_WITHOUT_CONSEQUENCE = (
    events.AgentHeartbeat
    | events.BatchHeartbeat
    | events.NodeHeartbeat
    | events.NodeDisconnected
    | events.NodeHardwareReported
)
"""Events that only renew a last contact, end a stream that decides nothing, or say what a later decision looks at."""
_ABOUT_A_NODE = (
    events.AgentAttached
    | events.AgentDisconnected
    | events.AgentReported
    | events.PeerAccused
    | events.ProbeAnswered
    | events.NodeEvent
)


class Core:
    """Durable state and observed state, and the decisions on them."""

    def __init__(self, state: DurableState, now: float, limits: Limits | None = None) -> None:
        """Continue from `state` at time `now` (seconds). Nothing is observed yet."""
        self.state = state
        self._limits = limits or Limits()
        self.observed = ObservedState(observing_since=now)
        self.index = StateIndex(state, self.observed)
        self._due = Deadlines()
        for gang in state.gangs.values():
            if not gang.final or gang.growth.pool:
                self._due.set(gang.id, now)  # after a restart, an agent that does not attach again must be detected
        self._due.set(CORRELATED_FAULTS, hardware_signals.next_deadline(state, self.observed, now))

    def decide(self, event: events.Event, now: float) -> Outcome:
        """Observe `event`, decide what follows, and apply the decisions to the durable state.

        Returns: the facts, to be journaled before anyone acts on them; the probes to make; when to send a Tick.
        """
        if isinstance(event, events.PeerAccused) and not self._is_member(event):
            return Outcome(
                next_tick_at=self._due.nearest
            )  # a suspicion of a node that is no member would never be dropped
        observe(self.observed, event, now)
        if isinstance(event, _WITHOUT_CONSEQUENCE) and not _has_consequence(self.state, event):
            return Outcome(next_tick_at=self._due.nearest)
        self.index.note_event(event)
        about = event.node if isinstance(event, _ABOUT_A_NODE) else None
        turn = Turn(self.state, self.observed, self.index, now, about, self._limits)
        _decide_from_event(turn, event)
        for gang in self._gangs_to_advance(turn, event, now):
            turn.outcome.next_tick_at = None
            advance(GangTurn(turn, gang))
            self._set_deadline(gang, turn)
        if self.index.degraded and turn.outcome.facts:
            drains.drain_degraded_without_gang(turn)
        if self.state.correlated_faults and any(isinstance(fact, facts.NodeJudged) for fact in turn.outcome.facts):
            hardware_signals.resolve_explained(turn)
        if self.state.correlated_faults or self._due.get(CORRELATED_FAULTS) is not None:
            self._set_deadline_of_correlated_faults(now)
        turn.outcome.next_tick_at = self._due.nearest
        return turn.outcome

    def batch_may_end(self, gang: Gang, job: int, restarts: int) -> bool:
        """The batch process of `job`, started after `restarts` restarts, may end.

        Its end must not end a job that goes on: either the gang is over, or Slurm has put this run back into the queue.
        A batch process that stays longer than that holds its node until Slurm kills it (KillWait, 30 s by default), and
        so delays the next run.
        """
        if gang.slurm.run_is_over(job, restarts):
            return True
        if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED):
            seen = self.observed.gang(gang.id)
            return job == gang.slurm.job and seen.job_restarts > restarts and not seen.job_ended
        return gang.final and not self.state.owes("requeue_off", gang.id)

    def why_no_swap(self, gang: Gang, node: str, now: float) -> requested_swap.Refusal | None:
        """Why no spare can take the place of `node` now; None: a request would be carried out."""
        turn = Turn(self.state, self.observed, self.index, now, None, self._limits)
        return requested_swap.why_not(GangTurn(turn, gang), node)

    def wanted_check(self, node: str, now: float) -> str:
        """The check that the daemon of the node shall make, by its name; empty: none."""
        return resuming.wanted_check(self.state, self.observed, self._limits, node, now)

    def _is_member(self, event: events.PeerAccused) -> bool:
        gang = self.state.gangs.get(event.gang)
        return gang is not None and event.node in gang.roster.members

    def _set_deadline(self, gang: Gang, turn: Turn) -> None:
        due, before = turn.outcome.next_tick_at, self._due.get(gang.id)
        if due is not None:
            due = max(due, turn.now + 0.005)  # a deadline in the past means: at the next turn
        if turn.changed_node is not None and before is not None:
            due = (
                before if due is None else min(due, before)
            )  # only one node was examined: the deadlines of the others hold
        self._due.set(gang.id, due)

    def _set_deadline_of_correlated_faults(self, now: float) -> None:
        due, before = hardware_signals.next_deadline(self.state, self.observed, now), self._due.get(CORRELATED_FAULTS)
        if due is not None and before is not None and before > now:
            due = min(due, before)  # events that come often must not delay the next look for ever
        self._due.set(CORRELATED_FAULTS, due)

    def _gangs_to_advance(self, turn: Turn, event: events.Event, now: float) -> list[Gang]:
        """The gangs that this event may move."""
        gangs = self.state.gangs
        match event:
            case events.Tick():
                judged = [fact.node for fact in turn.outcome.facts if isinstance(fact, facts.NodeJudged)]
                homes = [gang.id for node in judged for gang in self.index.gangs_of(node)]
                return [gangs[g] for g in dict.fromkeys([*self._due.pop_due(now), *homes]) if g in gangs]
            case (
                events.NodeAttached()
                | events.NodeDisconnected()
                | events.NodeHeartbeat()
                | events.NodeSignalled()
                | events.SlurmNodeChanged()
                | events.DrainRequested()
                | events.NodeCheckReported()
                | events.NodeHardwareReported()
            ):
                with_node = self.index.gangs_of(event.node)
                health_changed = any(isinstance(fact, facts.NodeJudged) for fact in turn.outcome.facts)
                if not health_changed and not isinstance(event, events.SlurmNodeChanged):
                    return with_node
                waiting = [gang for gang in gangs.values() if event.node in gang.slurm.excluded and not gang.final]
                return list({gang.id: gang for gang in (*with_node, *waiting)}.values())
            case events.FabricSeen():
                return []  # the next placement uses it
            case _:
                return [gangs[event.gang]] if event.gang in gangs else []


def _decide_from_event(turn: Turn, event: events.Event) -> None:
    """Decide the facts that follow from the event itself, whatever else is observed."""
    match event:
        case events.GangSubmitted():
            _register_gang(turn, event)
        case events.AgentAttached():
            _admit_agent(turn, event)
        case events.SlurmJobChanged():
            _record_job_change(turn, event)
        case events.SlurmAnswered():
            _settle_call(turn, event)
        case events.BatchHeartbeat():
            _note_unsupervised(turn, event)
        case events.SwapRequested() if event.gang in turn.state.gangs:
            requested_swap.plan(GangTurn(turn, turn.state.gangs[event.gang]), event)
        case events.NodeAttached() | events.NodeHeartbeat() | events.NodeSignalled() | events.SlurmNodeChanged():
            _decide_on_node(turn, event)
        case events.DrainRequested():
            drains.begin(turn, event)
        case events.NodeCheckReported():
            resuming.take_check(turn, event)
        case events.FabricSeen():
            for gang in turn.state.gangs.values():
                if (change := note_change(gang, turn.observed)) is not None:
                    turn.record(change)
        case events.Tick() if turn.state.correlated_faults:
            hardware_signals.resolve_unexplained(turn)
        case _:
            pass


def _register_gang(turn: Turn, event: events.GangSubmitted) -> None:
    known = turn.state.gangs.get(event.gang)
    if known is not None and (known.final or not known.spec.awaits_launch or event.spec.awaits_launch):
        return
    turn.record(facts.GangRegistered(event.gang, event.job, event.owner_uid, event.name, event.spec, event.spec_json))
    if known is None:
        _forget_old_gangs(turn)


def _forget_old_gangs(turn: Turn) -> None:
    """Let old gangs go. Only submissions make the durable state grow, so each submission removes old gangs."""
    owing = {call.gang for call in turn.state.owed.values()}
    over = [g for g in turn.state.gangs.values() if g.final and g.slurm.job_over and g.id not in owing]
    over.sort(key=lambda gang: gang.phase_at, reverse=True)
    for place, gang in enumerate(over):
        if place >= GANGS_KEPT or turn.now - gang.phase_at > GANG_KEPT_S:
            turn.record(facts.GangForgotten(gang.id))
            turn.observed.gangs.pop(gang.id, None)


def _record_job_change(turn: Turn, event: events.SlurmJobChanged) -> None:
    gang = turn.state.gangs.get(event.gang)
    if gang is None:
        return
    if event.nodes and event.nodes != gang.slurm.job_nodes:
        turn.record(facts.JobChanged(event.gang, event.nodes))
    if gang.final and event.ended and not gang.slurm.job_over:
        turn.record(facts.JobEnded(event.gang, event.ended))


def _note_unsupervised(turn: Turn, event: events.BatchHeartbeat) -> None:
    gang = turn.state.gangs.get(event.gang)
    if event.unsupervised and gang is not None and not gang.findings.unsupervised:
        turn.record(facts.LaunchUnsupervised(gang.id, event.unsupervised))


def _admit_agent(turn: Turn, event: events.AgentAttached) -> None:
    gang = turn.state.gangs.get(event.gang)
    if gang is None or gang.final:
        return
    if event.pool:
        _admit_pool_agent(turn, gang, event)
        return
    if gang.slurm.run_is_over(event.job, event.restart_count):
        return  # an agent of an earlier run, whose authentication took longer than that of the new run's first agent
    if event.restart_count > gang.slurm.restart_count or event.job != gang.slurm.job:
        if gang.phase not in (Phase.REQUEUED, Phase.SUBMITTED):
            turn.record(facts.PhaseChanged(gang.id, Phase.REQUEUED, "Slurm started the job again"))
        gathering.begin_gathering(GangTurn(turn, gang), event.job, event.restart_count)
    elif gang.phase is Phase.REQUEUED:
        return  # an agent of the run that ends
    turn.observed.gang(gang.id).own_nodes = event.own_nodes
    _add_member(turn, gang, event)


def _admit_pool_agent(turn: Turn, gang: Gang, event: events.AgentAttached) -> None:
    if shared_pool.refusal(gang, event.pool, event.job, event.node) or event.restart_count != gang.slurm.restart_count:
        return  # the pool job will be cancelled
    if event.node in turn.index.out_of_service or gang.phase is Phase.REQUEUED:
        return  # the agent attaches again once Slurm has the node in service
    if not gang.growth.pool[event.pool].job:
        turn.record(facts.PoolJobQueued(gang.id, event.pool, event.job))
    _add_member(turn, gang, event)


def _add_member(turn: Turn, gang: Gang, event: events.AgentAttached) -> None:
    if gang.phase is Phase.SUBMITTED:
        gathering.begin_gathering(GangTurn(turn, gang), gang.slurm.job, gang.slurm.restart_count)
    seen = turn.observed.gang(gang.id)
    seen.first_attach_at = seen.first_attach_at or turn.now
    member = gang.roster.members.get(event.node)
    if member is not None and member.job != event.job:
        member = None  # the node comes back from the pool, repaired
    if member is not None and (member.removed or member.incarnation == event.incarnation):
        return
    if member is not None:
        seen.relaunched_at = turn.now
    carried = member is not None and any(s.node == event.node for s in gang.roster.seats)
    if carried and gang.phase in (Phase.STARTING, Phase.RUNNING):
        gang_turn = GangTurn(turn, gang)
        fencing.fence_generation(gang_turn, f"muster-agent on {event.node} was started anew", True, turn.now)
    turn.record(
        facts.MemberJoined(
            gang.id,
            event.node,
            event.job,
            event.incarnation,
            event.peer_address,
            event.batch_host,
            event.leaf,
            event.nvlink_domain,
            event.adapter_bandwidth,
        )
    )


def _settle_call(turn: Turn, event: events.SlurmAnswered) -> None:
    owed = turn.state.owed.get(event.call)
    if owed is None:
        return
    turn.record(facts.SlurmCallSettled(event.gang, event.call, event.error or ""))
    if owed.if_run_has_node is not None and not event.error:
        circuit_breaker.judge_drained(turn, owed)
    drains.end_if_refused(turn, owed, event.error)
    gang = turn.state.gangs.get(owed.gang)
    if (
        owed.verb != "requeue"
        or not event.error
        or gang is None
        or not _waits_for_requeue(turn.state, gang, turn.observed.gang(gang.id))
    ):
        return
    if CANCELLED in event.error:
        end_gang_as_slurm(GangTurn(turn, gang), "CANCELLED")
    else:
        end_gang(GangTurn(turn, gang), Phase.FAILED, EXIT_NO_NODES, f"Slurm refused to requeue the job: {event.error}")


def _waits_for_requeue(state: DurableState, gang: Gang, seen: ObservedGang) -> bool:
    """Only Slurm's answer brings the job back. Otherwise the refusal is of no account: somebody else had the job
    requeued meanwhile, or it runs again."""
    waits = gang.phase is Phase.REQUEUED and not seen.is_requeued_after(gang.slurm.restart_count)
    return waits and not state.owes("requeue", gang.id)


def _has_consequence(state: DurableState, event: events.Event) -> bool:
    """A heartbeat that is more than one: a node lives again, a launch has failed on a node, is not supervised, or is
    interrupted."""
    if isinstance(event, events.BatchHeartbeat):
        gang = state.gangs.get(event.gang)
        failed = bool(event.unlaunched or event.failed) and gang is not None and gang.phase is Phase.GATHERING
        return failed or bool(event.unsupervised or event.interrupted)
    return _shows_life_again(state, event)


def _shows_life_again(state: DurableState, event: events.Event) -> bool:
    """The event is a sign of life of a node that was LOST or HUNG. Its stream may have outlived a short silence."""
    if not isinstance(event, events.NodeAttached | events.NodeHeartbeat):
        return False
    return state.node(event.node).health in UNRESPONSIVE


def _decide_on_node(
    turn: Turn, event: events.NodeAttached | events.NodeHeartbeat | events.NodeSignalled | events.SlurmNodeChanged
) -> None:
    node = turn.state.node(event.node)
    if _shows_life_again(turn.state, event):
        turn.record(facts.NodeJudged(event.node, NodeHealth.RETURNING, "its daemon is heard again"))
    match event:
        case events.NodeAttached():
            reported = (event.boot_id, event.probe_address, event.addresses)
            booted = node.boot_id not in ("", event.boot_id)
            if (node.boot_id, node.probe_address, node.addresses) != reported:
                turn.record(facts.NodeRegistered(event.node, *reported))
            if booted and turn.state.node(event.node).health is NodeHealth.DEGRADED:
                turn.record(facts.NodeJudged(event.node, NodeHealth.FIT, "it has booted since its precursor"))
        case events.NodeSignalled():
            hardware_signals.decide(turn, event)
        case events.SlurmNodeChanged():
            if turn.state.owes_for_node(event.node):
                return
            resumed = node.health in RESUMABLE or (node.health is NodeHealth.DEGRADED and node.drain is not None)
            if event.in_service and resumed:
                turn.record(facts.NodeJudged(event.node, NodeHealth.FIT, event.text))
            drains.begin_if_it_fails(turn, event)
            drains.end_if_in_service(turn, event)
