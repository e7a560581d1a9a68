"""The way out of training: every rank has exited, or was stopped by plan; what they have kept is saved first."""

from muster.daemon.coordinator.core.recovery import flushing, gang_end, requeueing
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.state.turn import GangTurn


def finish(gt: GangTurn) -> None:
    """Every rank has exited with 0."""
    if gt.gang.stop is not None:
        leave(gt)
    elif not flushing.begin(gt, "the job is done", Phase.DONE):
        gang_end.end(gt, Phase.DONE, 0, "every rank exited with 0")


def leave(gt: GangTurn) -> None:
    """No rank runs any more: save what they have kept, then go on as the stop was planned."""
    gang, stop = gt.gang, gt.gang.stop
    assert stop is not None
    kept = gang.phase in (Phase.RUNNING, Phase.RECOVERING)
    if not kept or not flushing.begin(gt, stop.reason, stop.after):
        _go_on(gt, stop.after, stop.reason)


def _go_on(gt: GangTurn, after: Phase | None, reason: str) -> None:
    if gt.job_ended:
        gang_end.end_as_slurm(gt, gt.job_ended)
    elif after is Phase.REQUEUED:
        requeueing.requeue(gt, reason)
    else:
        gang_end.end(gt, Phase.FAILED, gang_end.EXIT_STOPPED, reason)


def drain(gt: GangTurn) -> None:
    """The last checkpoint is being written; go on as planned once it is, or can't be."""
    gang = gt.gang
    if (gang.flush is not None and not flushing.over(gang)) or flushing.go_on(gt):
        return
    error = gang.flush.error if gang.flush else ""
    words = f"the last checkpoint could not be written: {error}"
    if gang.drain_to is not Phase.DONE:
        _go_on(gt, gang.drain_to, f"{gang.reason} ({words})" if error else gang.reason)
    elif error:
        gang_end.end(gt, Phase.FAILED, gang_end.EXIT_NOT_DURABLE, f"every rank exited with 0, but {words}")
    else:
        gang_end.end(gt, Phase.DONE, 0, "every rank exited with 0")
