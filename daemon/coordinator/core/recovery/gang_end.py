"""The end of a gang: by decision, by a user's cancel, or with its Slurm job; and the end of the job after it."""

from muster.daemon.coordinator.core.recovery import planned_stop
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.state.slurm_jobs import SlurmJob
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_CANCELLED, EXIT_FAILED_AGAIN, EXIT_OF_SLURM, EXIT_SCRIPT_LOST

JOB_ENDS_S = 15.0
"""Seconds after the gang's end within which a batch script ends its job."""


def end_if_cancelled_or_ended(gang_turn: GangTurn) -> bool:
    """End the gang after a user's cancel, or after Slurm's own end of the job. True: it has ended, or was requeued."""
    gang, seen, state = gang_turn.gang, gang_turn.observed, gang_turn.job_ended
    if seen.cancel_requested_by:
        end_gang(gang_turn, Phase.CANCELLED, EXIT_CANCELLED, f"cancelled by {seen.cancel_requested_by}")
        seen.cancel_requested_by = ""
    elif state and not _ended_before_the_requeue(gang, seen, state) and not planned_stop.can_save(gang_turn):
        end_gang_as_slurm(gang_turn, state)
    return gang.final or planned_stop.requeued_by_slurm(gang_turn)


def _ended_before_the_requeue(gang: Gang, seen: ObservedGang, state: str) -> bool:
    """The end that Slurm reports is the end of the run that is being requeued."""
    older = seen.job_restarts <= gang.slurm.restart_count
    return gang.phase is Phase.REQUEUED and older and state not in ("CANCELLED", "GONE")


def end_gang(gang_turn: GangTurn, phase: Phase, exit_code: int, reason: str) -> None:
    """End the gang, and its job if the job's batch script can't."""
    gang, job_ended = gang_turn.gang, gang_turn.job_ended
    of_job = _code_of_job(gang, exit_code)
    if of_job != exit_code and not job_ended:
        reason += f". What its script does behind the launch is lost with a node: the job ends with {of_job}"
    gang_turn.turn.record(facts.GangEnded(gang.id, phase, exit_code, reason))
    shared_pool.close_all(gang_turn, reason, joined=phase is Phase.CANCELLED)
    if job_ended:
        gang_turn.turn.record(facts.JobEnded(gang.id, job_ended))
        return
    if phase is Phase.CANCELLED:
        gang_turn.turn.owe("cancel", gang.id, gang.slurm.job, f"muster: {reason}")
        return
    if exit_code == EXIT_FAILED_AGAIN and not gang.spec.own_nodes:  # a user's own script requeues as its author means
        gang_turn.turn.owe("requeue_off", gang.id, gang.slurm.job, f"muster: {reason}")
    if is_batch_host_dead(gang.roster, gang.slurm):
        gang_turn.turn.owe("complete", gang.id, gang.slurm.job, f"muster: {reason}", exit_code=of_job)


def _code_of_job(gang: Gang, exit_code: int) -> int:
    """The exit code of the job. Its script may be lost with the batch host."""
    lost = exit_code == 0 and gang.spec.script_goes_on and is_batch_host_dead(gang.roster, gang.slurm)
    return EXIT_SCRIPT_LOST if lost else exit_code


def end_gang_as_slurm(gang_turn: GangTurn, state: str) -> None:
    """End the gang in the way in which Slurm ended its job."""
    gang, seen, exit_code, phase = gang_turn.gang, gang_turn.observed, EXIT_OF_SLURM, Phase.FAILED
    if state == "CANCELLED":
        exit_code, phase = EXIT_CANCELLED, Phase.CANCELLED
    elif state == "COMPLETED" and gang.spec.awaits_launch:
        exit_code, phase = 0, Phase.DONE
    why = f": {seen.job_end_words}" if seen.job_end_words and not seen.first_attach_at else ""
    end_gang(
        gang_turn,
        phase,
        exit_code,
        f"Slurm ended job {gang.slurm.job}: {state}{why}",
    )


def is_batch_host_dead(roster: Roster, job: SlurmJob) -> bool:
    """No process is left that would report the job's end to Slurm."""
    host = roster.batch_host
    left = host is not None and bool(job.job_nodes) and host.node not in job.job_nodes
    # A node that answers has lost its agent alone: after a user's signal, or to a lack of memory.
    return host is None or left or (host.gone and host.removal_reason != host.agent_ended_reason)


def _is_cancel_owed(state: DurableState, gang: Gang) -> bool:
    """Slurm is asked to cancel the job already. A user may ask as often as they like. Pool jobs have calls as well."""
    wanted = ("cancel", gang.id, gang.slurm.job)
    return any((call.verb, call.gang, call.job) == wanted for call in state.owed.values())


def complete_job(gang_turn: GangTurn) -> None:
    """End the job of a final gang. Its batch script normally does; if that does not happen, the script's host is
    dead. A user's own script may go on for as long as it likes, and ends its job while its host lives."""
    gang = gang_turn.gang
    asked_by, gang_turn.observed.cancel_requested_by = gang_turn.observed.cancel_requested_by, ""
    if asked_by and not gang.slurm.job_over and not _is_cancel_owed(gang_turn.turn.state, gang):
        gang_turn.turn.owe("cancel", gang.id, gang.slurm.job, f"muster: cancelled by {asked_by}")
    over = gang.slurm.job_over or gang.slurm.completion_owed or gang.phase is Phase.CANCELLED
    if over and not gang.growth.pool:
        return
    if gang.spec.own_nodes and not over and not is_batch_host_dead(gang.roster, gang.slurm):
        return
    if gang_turn.now - gang.phase_at < JOB_ENDS_S:
        gang_turn.turn.tick_at(gang.phase_at + JOB_ENDS_S)
        return
    shared_pool.close_all(gang_turn, gang.reason, joined=True)
    if not over:
        words = f"muster: {gang.reason}"
        gang_turn.turn.owe("complete", gang.id, gang.slurm.job, words, exit_code=_code_of_job(gang, gang.exit_code))
