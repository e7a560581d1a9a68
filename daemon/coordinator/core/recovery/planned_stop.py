"""Planned stops: Slurm is about to end the job, so its ranks stop at a step, and what they have kept is saved.

Slurm says so in three ways: by the time limit that it shows, by a signal to every process of the job (a preemption's
grace time, the end of the time limit, an operator's requeue), and by a job that it has ended or put back into the queue
already, whose processes live on for a while (KillWait, 30 s by default).
"""

from muster.daemon.coordinator.core.detection import failure_detector
from muster.daemon.coordinator.core.recovery import flushing, shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, Phase
from muster.daemon.coordinator.core.state.turn import GangTurn

STOP_TIMEOUT_S = 15.0
"""Ranks that are asked to stop get this long: what they have kept has to be written within KillWait, too."""
LIMIT_MARGIN_S = 5.0
"""SIGTERM so close to the time limit is the limit's."""
ENDS_WITHOUT_SAVING = frozenset({"CANCELLED", "GONE"})
"""Ends after which nobody wants the state."""


def plan_stop(gang_turn: GangTurn) -> None:
    """Plan a stop where there is reason to."""
    gang = gang_turn.gang
    if gang.stop is not None or gang.phase not in ACTIVE | {Phase.GATHERING}:
        return
    if reason := _taken(gang_turn):
        # Slurm has decided what follows: where it has ended the job, the gang ends as the job did.
        gang_turn.turn.record(facts.StopPlanned(gang.id, reason, Phase.REQUEUED))
    elif 2 * len(gang_turn.index.sigterm_received) > len(gang_turn.index.present):
        words = gang_turn.observed.status(min(gang_turn.index.sigterm_received)).sigterm_notice
        limit_at = _limit_at(gang_turn)
        limit = limit_at is not None and gang_turn.now >= limit_at - LIMIT_MARGIN_S
        gang_turn.turn.record(
            facts.StopPlanned(gang.id, words, _after(gang.spec.requeue_at_limit if limit else gang.spec.requeue))
        )
    elif reason := _limit(gang_turn):
        gang_turn.turn.record(facts.StopPlanned(gang.id, reason, _after(gang.spec.requeue_at_limit)))


def _after(requeue: bool) -> Phase:
    return Phase.REQUEUED if requeue else Phase.FAILED


def _taken(gang_turn: GangTurn) -> str:
    """What Slurm has done to the job already, in words."""
    if gang_turn.job_ended:
        return f"Slurm ends job {gang_turn.gang.job}: {gang_turn.job_ended}"
    if gang_turn.job_requeued:
        return "Slurm has put the job back into the queue"
    return ""


def _limit(gang_turn: GangTurn) -> str:
    """Why the job's time limit asks for a stop now; empty where it does not yet."""
    spec, limit_at = gang_turn.gang.spec, _limit_at(gang_turn)
    if limit_at is None or not spec.stop_before_s:
        return ""
    ahead = min(spec.stop_before_s, gang_turn.observed.limit_s / 4)  # of a short job most is left for training
    if gang_turn.now < limit_at - ahead:
        gang_turn.turn.tick_at(limit_at - ahead)
        return ""
    return f"the time limit of job {gang_turn.gang.job} is {max(0.0, limit_at - gang_turn.now):.0f} s away"


def _limit_at(gang_turn: GangTurn) -> float | None:
    """When the time limit of this run of the job ends it. What Slurm last said may be about the run before."""
    return gang_turn.observed.limit_at if gang_turn.observed.job_restarts == gang_turn.gang.restart_count else None


def requeued_by_slurm(gang_turn: GangTurn) -> bool:
    """Slurm has taken the job, and nobody is left who could save anything. True: the gang has moved on."""
    gang = gang_turn.gang
    if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED) or not gang_turn.job_requeued or _can_save(gang_turn):
        return False
    words = "Slurm has put the job back into the queue"
    shared_pool.close_all(gang_turn, words, joined=True)
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.REQUEUED, words))
    return True


def can_save(gang_turn: GangTurn) -> bool:
    """Slurm has ended the job, and there are agents left that can save what their ranks have kept."""
    return _can_save(gang_turn) and gang_turn.job_ended not in ENDS_WITHOUT_SAVING


def _can_save(gang_turn: GangTurn) -> bool:
    if gang_turn.gang.phase is Phase.STARTING and flushing.unsaved_version(gang_turn) is None:
        return False  # its ranks have done nothing yet
    if gang_turn.gang.phase not in ACTIVE | {Phase.DRAINING}:
        return False
    # An agent that is out of touch for a moment is asked after, and given up when it is known to have ended.
    return (
        bool(gang_turn.index.present) or flushing.unsaved_version(gang_turn) is not None
    )  # who is out can write as well


def fence_if_overdue(gang_turn: GangTurn) -> bool:
    """The ranks had their time to stop. True: they are ended now."""
    stop = gang_turn.gang.stop
    if stop is None:
        return False
    if gang_turn.now < stop.at + STOP_TIMEOUT_S:
        gang_turn.turn.tick_at(stop.at + STOP_TIMEOUT_S)
        return False
    words = f"{stop.reason}; the ranks have not stopped within {STOP_TIMEOUT_S:.0f} s"
    failure_detector.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)
    return True
