"""The way out of training: every rank has exited, or was stopped by plan; what they have kept is saved first."""

from muster.daemon.coordinator.core.recovery import flushing, gang_end, requeueing
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn


def finish(gang_turn: GangTurn) -> None:
    """Every rank has exited with 0."""
    if gang_turn.gang.stop is not None:
        leave(gang_turn)
    elif not flushing.begin(gang_turn, "the job is done", Phase.DONE):
        gang_end.end(gang_turn, Phase.DONE, 0, "every rank exited with 0")


def leave(gang_turn: GangTurn) -> None:
    """No rank runs any more: save what they have kept, then go on as the stop was planned."""
    gang, stop = gang_turn.gang, gang_turn.gang.stop
    assert stop is not None
    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)
    if not kept or not flushing.begin(gang_turn, stop.reason, stop.after):
        _go_on(gang_turn, stop.after, stop.reason)


def _go_on(gang_turn: GangTurn, after: Phase | None, reason: str) -> None:
    if gang_turn.job_ended:
        gang_end.end_as_slurm(gang_turn, gang_turn.job_ended)
    elif after is Phase.REQUEUED:
        requeueing.requeue(gang_turn, reason)
    else:
        gang_end.end(gang_turn, Phase.FAILED, gang_end.EXIT_STOPPED, reason)


def drain(gang_turn: GangTurn) -> None:
    """The last checkpoint is being written; go on as planned once it is, or can't be."""
    gang = gang_turn.gang
    if (gang.flush is not None and not flushing.over(gang)) or flushing.go_on(gang_turn):
        return
    error = gang.flush.error if gang.flush else ""
    words = f"the last checkpoint could not be written: {error}"
    if gang.drain_to is not Phase.DONE:
        _go_on(gang_turn, gang.drain_to, f"{gang.reason} ({words})" if error else gang.reason)
    elif error:
        gang_end.end(gang_turn, Phase.FAILED, gang_end.EXIT_NOT_DURABLE, f"every rank exited with 0, but {words}")
    else:
        gang_end.end(gang_turn, Phase.DONE, 0, "every rank exited with 0")
