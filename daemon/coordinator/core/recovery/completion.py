"""The regular ends of training: every rank has exited, or the ranks were stopped by plan. What they kept is saved
first."""

from muster.checkpoint.format.folder_names import JOB_IS_DONE
from muster.daemon.coordinator.core.recovery import flushing, gang_end, requeueing, restore_plan
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_NOT_DURABLE, EXIT_STOPPED


def complete(gang_turn: GangTurn) -> None:
    """Every rank has exited with 0: write the last checkpoint, then end the gang."""
    if gang_turn.gang.plans.stop is not None:
        save_and_leave(gang_turn)
    elif not flushing.start_final_flush(gang_turn, JOB_IS_DONE, Phase.DONE):
        gang_end.end_gang(gang_turn, Phase.DONE, 0, "every rank exited with 0")


def save_and_leave(gang_turn: GangTurn) -> None:
    """No rank runs after a planned stop: save what the ranks kept, then enter the phase that the stop names."""
    gang, stop = gang_turn.gang, gang_turn.gang.plans.stop
    assert stop is not None
    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)
    if kept and flushing.unsaved_version(gang_turn) is None and _state_may_return(gang_turn):
        return
    if not kept or not flushing.start_final_flush(gang_turn, stop.reason, stop.next_phase):
        _enter_next_phase(gang_turn, stop.next_phase, stop.reason)


def _state_may_return(gang_turn: GangTurn) -> bool:
    """What the ranks have kept seems to be lost, and an agent that may hold it is about to attach again."""
    return bool(gang_turn.gang.spec.durable_dir) and restore_plan.memory_may_return(gang_turn)


def _enter_next_phase(gang_turn: GangTurn, after: Phase | None, reason: str) -> None:
    if gang_turn.job_ended:
        gang_end.end_gang_as_slurm(gang_turn, gang_turn.job_ended)
    elif after is Phase.REQUEUED:
        requeueing.requeue(gang_turn, reason)
    else:
        kept_nothing = gang_turn.gang.newest.stepped_generation > 0 and not gang_turn.gang.spec.durable_dir
        lost = "; all steps are lost, because the job has no durable_dir" if kept_nothing else ""
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_STOPPED, reason + lost)


def continue_drain(gang_turn: GangTurn) -> None:
    """The last checkpoint is being written. Once it is written, or can't be, enter the next phase."""
    gang = gang_turn.gang
    if gang.checkpoint.is_flushing or flushing.flush_newer_version(gang_turn):
        return
    error = gang.checkpoint.flush.error if gang.checkpoint.flush else ""
    words = f"the last checkpoint could not be written: {error}"
    if gang.plans.phase_after_drain is not Phase.DONE:
        _enter_next_phase(gang_turn, gang.plans.phase_after_drain, f"{gang.reason} ({words})" if error else gang.reason)
    elif error:
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_NOT_DURABLE, f"every rank exited with 0, but {words}")
    else:
        gang_end.end_gang(gang_turn, Phase.DONE, 0, "every rank exited with 0")
