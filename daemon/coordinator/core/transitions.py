"""The next transition of a gang: for each phase, what must hold before the gang moves on.

Every rule is level-triggered. A rule looks at durable and observed state, never at the last event, so lost, doubled and
reordered events change nothing but the moment.

Nothing but its end is decided about a gang whose job Slurm has suspended. All processes of the job are stopped, so
their silence is no evidence. Once resumed, every agent has its whole time to be heard again.
"""

from collections.abc import Callable

from muster.daemon.coordinator.core.detection import departure, failure_detector, fencing, node_checks
from muster.daemon.coordinator.core.recovery import (
    completion,
    failures,
    flushing,
    gang_end,
    gathering,
    planned_stop,
    planned_swap,
    recovering,
    requeueing,
    running,
)
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, MONITORED, Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

ROUNDS = 12
"""Rounds of decisions for one gang in one turn, at most. Rules without a bug need three, of which the last decides
nothing (measured: 150 seeds of the simulator)."""
UNSETTLED_PAUSE_S = 1.0
"""Seconds until a gang whose rules came to no end is looked at again. At each look such rules write ROUNDS decisions or
more to the journal. One look a second leaves the coordinator free for other gangs, and does not fill the disk."""

Rule = Callable[[GangTurn], None]

OF_PHASE: dict[Phase, tuple[Rule, ...]] = {
    Phase.SUBMITTED: (requeueing.release_after_failed_launch, gathering.look_for_job),
    Phase.GATHERING: (gathering.gather,),
    Phase.PREFLIGHT: (recovering.recover,),
    Phase.STARTING: (running.supervise,),
    Phase.RUNNING: (running.supervise,),
    Phase.RECOVERING: (recovering.recover,),
    Phase.DRAINING: (completion.continue_drain,),
    Phase.REQUEUED: (requeueing.release_after_failed_launch, requeueing.readmit_nodes, gathering.look_for_job),
    Phase.DONE: (gang_end.complete_job,),
    Phase.FAILED: (gang_end.complete_job,),
    Phase.CANCELLED: (gang_end.complete_job,),
}
"""The rules of each phase, in order: they decide where the gang goes next."""


def _apply_rules(gang_turn: GangTurn) -> None:
    """One round."""
    if gang_turn.gang.final or not _apply_common_rules(gang_turn):
        for rule in OF_PHASE[gang_turn.gang.phase]:
            rule(gang_turn)


def _apply_common_rules(gang_turn: GangTurn) -> bool:
    """The rules of every phase but the final ones. They come before those of the phase.

    Returns:
        True: the gang ends or waits, and the rules of its phase must not decide now.
    """
    gang, suspended = gang_turn.gang, gang_turn.observed.suspended_jobs
    if gang_end.end_if_cancelled_or_ended(gang_turn) or gang.slurm.job in suspended:
        return True
    planned_stop.plan_stop(gang_turn)
    if suspended and gang.plans.stop is None and not suspended.isdisjoint(gang.jobs()):
        return True  # a node of the shared pool is waited for, but not while Slurm is about to end the gang's own job
    if failures.are_agents_failing(gang_turn):
        return True
    if gang.phase in MONITORED | {Phase.GATHERING}:
        departure.remove_departed(gang_turn)
    node_checks.record_results(gang_turn)
    if gang.phase in ACTIVE:
        _remove_unfit(gang_turn)
        node_checks.leave_out_failed(gang_turn)
    failure_detector.examine(gang_turn)
    shared_pool.follow_requests(gang_turn, bool(gang.growth.pool) and planned_swap.waits_for_spare(gang_turn))
    flushing.check_flush(gang_turn)
    return False


def _remove_unfit(gang_turn: GangTurn) -> None:
    """Remove the members whose node is out of service. If one carries running ranks, they are fenced."""
    for node in sorted(gang_turn.index.out_of_service):
        member, known = gang_turn.gang.roster.members[node], gang_turn.turn.state.node(node)
        fencing.remove_member(gang_turn, member, known.reason, alive=True, program_error=known.program_error)


def advance(gang_turn: GangTurn, decide: Rule = _apply_rules) -> None:
    """Call `decide`, one round of the rules, until it decides nothing more: the observed state allows no further
    transition.

    Rules that still decide something after ROUNDS rounds contradict each other, which is a bug. The outcome reports the
    bug, and the gang is examined again after UNSETTLED_PAUSE_S. The decisions of this turn stand. Other gangs go on.
    """
    decided = gang_turn.turn.outcome.facts
    for _ in range(ROUNDS):
        before = len(decided)
        decide(gang_turn)
        if len(decided) == before:
            return
    newest = ", ".join(type(fact).__name__ for fact in decided[before:])
    gang_turn.turn.outcome.bugs.append(
        f"gang {gang_turn.gang.id} in phase {gang_turn.gang.phase}: the rules came to no end in {ROUNDS} rounds, "
        f"the last of which decided {newest}; the gang is looked at again in {UNSETTLED_PAUSE_S:g} s"
    )
    gang_turn.turn.tick_at(gang_turn.now + UNSETTLED_PAUSE_S)
