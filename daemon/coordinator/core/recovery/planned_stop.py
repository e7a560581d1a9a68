"""Planned stops: Slurm is about to end the job, so the ranks stop at one step, and what they kept is saved.

Slurm announces the end in three ways: by the job's time limit; by SIGTERM to every process of the job (the grace time
of a preemption, the end of the time limit, an operator's requeue); or by a job that is already ended or requeued while
its processes still live (KillWait, 30 s by default).

Orders carry the stop, and the ranks agree on one step. A generation that has not stopped in time is fenced. Then the
newest version is written, and the gang is requeued or ends. SIGTERM ends no agent: it winds down by itself only if no
order comes. What a user cancels is not saved once the coordinator knows of it. A launch that its user ends is saved,
and its script goes on.
"""

from muster.daemon.coordinator.core.detection import fencing
from muster.daemon.coordinator.core.recovery import flushing
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn

STOP_TIMEOUT_S = 15.0
"""Seconds that the ranks have to stop. What they kept must be written within KillWait, too, so this is half of it."""
LIMIT_MARGIN_S = 5.0
"""SIGTERM is taken for that of the time limit from so many seconds before `stop_before_s`. A script may have asked for
it (--signal=TERM@N), and the stop of a short job is planned later than that."""
ENDS_WITHOUT_SAVING = frozenset({"CANCELLED", "GONE"})
"""Ends of a job after which nobody wants the state."""


def plan_stop(gang_turn: GangTurn) -> None:
    """Plan a stop if there is a reason."""
    gang = gang_turn.gang
    if gang.plans.stop is not None or gang.phase not in ACTIVE | {Phase.GATHERING}:
        return
    if reason := _what_slurm_has_done(gang.slurm, gang_turn.observed):
        # Slurm has decided what follows. If Slurm has ended the job, the gang ends as the job did.
        gang_turn.turn.record(facts.StopPlanned(gang.id, reason, Phase.REQUEUED))
    elif signal := _signal_to_launch(gang.slurm, gang_turn.observed):
        gang_turn.turn.record(facts.StopPlanned(gang.id, f"the user has sent {signal} to the launch", Phase.FAILED))
    elif 2 * len(gang_turn.index.sigterm_received) > len(gang_turn.index.present):
        words = gang_turn.observed.status(min(gang_turn.index.sigterm_received)).sigterm_notice
        limit_at = _limit_at(gang.slurm, gang_turn.observed)
        at_limit = limit_at is not None and gang_turn.now >= limit_at - gang.spec.stop_before_s - LIMIT_MARGIN_S
        requeue = gang.spec.requeue_at_limit if at_limit else gang.spec.requeue
        gang_turn.turn.record(facts.StopPlanned(gang.id, words, _phase_after_stop(requeue)))
    elif reason := _limit_reason(gang_turn):
        gang_turn.turn.record(facts.StopPlanned(gang.id, reason, _phase_after_stop(gang.spec.requeue_at_limit)))


def _signal_to_launch(job: SlurmJob, seen: ObservedGang) -> str:
    """The signal with which the user has ended this launch; empty: none."""
    batch = seen.batch
    return batch.interrupted if batch is not None and batch.is_of(job.job, job.restart_count) else ""


def _phase_after_stop(requeue: bool) -> Phase:
    return Phase.REQUEUED if requeue else Phase.FAILED


def _what_slurm_has_done(job: SlurmJob, seen: ObservedGang) -> str:
    """How Slurm has ended this run of the job already, in words; empty: it has not."""
    if end := seen.end_of_run(job.restart_count):
        return f"Slurm ends job {job.job}: {end}"
    return "Slurm has put the job back into the queue" if seen.is_requeued_after(job.restart_count) else ""


def _limit_reason(gang_turn: GangTurn) -> str:
    """Why the job's time limit requires a stop now; empty if it does not yet."""
    gang, seen = gang_turn.gang, gang_turn.observed
    stop_at, limit_at = due_at(gang.spec, gang.slurm, seen), _limit_at(gang.slurm, seen)
    if stop_at is None or limit_at is None or not gang.spec.stop_before_s:
        return ""
    if gang_turn.now < stop_at:
        gang_turn.turn.tick_at(stop_at)
        return ""
    # The reason stays after the end, so it is true at any time.
    before_s = max(0.0, limit_at - gang_turn.now)
    return f"stopped for the time limit of job {gang.slurm.job}, {before_s:.0f} s before it"


def due_at(spec: GangSpec, job: SlurmJob, seen: ObservedGang) -> float | None:
    """When (seconds) the time limit of the job lets the ranks stop, or ends them; None: it is not known, or there is no
    limit."""
    limit_at = _limit_at(job, seen)
    most_s = seen.limit_s / 4  # most of a short job is left for training
    return None if limit_at is None else limit_at - min(spec.stop_before_s, most_s)


def _limit_at(job: SlurmJob, seen: ObservedGang) -> float | None:
    """When the time limit ends this run of the job; None if that is unknown. Slurm may still report the earlier run."""
    return seen.limit_at if seen.job_restarts == job.restart_count else None


def requeued_by_slurm(gang_turn: GangTurn) -> bool:
    """Slurm has requeued the job, and no agent is left to save anything. True: the gang is REQUEUED now."""
    gang = gang_turn.gang
    if gang.phase in (Phase.SUBMITTED, Phase.REQUEUED) or not gang_turn.job_requeued or _can_save(gang_turn):
        return False
    words = "Slurm has put the job back into the queue"
    if gang.phase is Phase.GATHERING and (reason := gang_turn.observed.pending_reason):
        words += f", and no agent is attached: {reason}"
    shared_pool.close_all(gang_turn, words, joined=True)
    gang_turn.turn.record(facts.PhaseChanged(gang.id, Phase.REQUEUED, words))
    return True


def can_save(gang_turn: GangTurn) -> bool:
    """Slurm has ended the job, and agents are left that can save what the ranks kept."""
    return _can_save(gang_turn) and gang_turn.job_ended not in ENDS_WITHOUT_SAVING


def _can_save(gang_turn: GangTurn) -> bool:
    phase = gang_turn.gang.phase
    if phase not in ACTIVE | {Phase.DRAINING}:
        return False
    # An agent that is out of touch for a moment is probed, and removed once it is known to have ended.
    if phase is not Phase.STARTING and gang_turn.index.present:
        return True
    return flushing.unsaved_version(gang_turn) is not None  # ranks that start have done nothing yet; who left can write


def fence_if_overdue(gang_turn: GangTurn) -> bool:
    """Fence the ranks if they have not stopped in time. True: they were fenced."""
    stop = gang_turn.gang.plans.stop
    if stop is None:
        return False
    if gang_turn.now < stop.at + STOP_TIMEOUT_S:
        gang_turn.turn.tick_at(stop.at + STOP_TIMEOUT_S)
        return False
    words = f"{stop.reason}; the ranks have not stopped within {STOP_TIMEOUT_S:.0f} s"
    fencing.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)
    return True
