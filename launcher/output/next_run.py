"""What the next run of a job that has ended can go on from. Pure."""

from __future__ import annotations

from muster.v1.api_pb2 import GangView

_CRASH_LOOP = 93
"""The exit code of a gang whose software failed again and again (docs/operations/something-is-down.md)."""


def why_not_by_itself(last: GangView) -> str:
    """Why only a user can want to go on from what this run has left; empty: there is no such reason."""
    if last.phase == "CANCELLED":
        return "was cancelled"
    if last.not_finite:
        return f"ended after a value that is not finite ({last.not_finite})"
    return "failed again and again" if last.exit_code == _CRASH_LOOP else ""


def what_is_left(ended: GangView) -> str:
    """The newest durable checkpoint of a job that has ended, and how to go on from it; empty: there is none."""
    if not (path := ended.checkpoint.durable_path):
        return ""
    if ended.phase == "DONE":
        return f"newest: {path}"
    if why_not_by_itself(ended):
        job = next(iter(ended.slurm_job_ids), ended.gang_id)
        return f"newest: {path}; muster submit --resume {job} goes on from it"
    return f"newest: {path}; submitted again, the job goes on from it"
