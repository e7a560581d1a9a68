"""Errors of the services: one exception with a gRPC status code and a message, which ends the call at the edge."""

from __future__ import annotations

from functools import partial

import grpc

from muster.daemon.transport.calls.call_refused import CallRefused

permission_denied = partial(CallRefused, grpc.StatusCode.PERMISSION_DENIED)
"""The caller has no right to do this."""
invalid_argument = partial(CallRefused, grpc.StatusCode.INVALID_ARGUMENT)
"""A field of the message is wrong."""
not_found = partial(CallRefused, grpc.StatusCode.NOT_FOUND)
"""The named gang, job or node does not exist."""
already_exists = partial(CallRefused, grpc.StatusCode.ALREADY_EXISTS)
"""Something else has the place of what the caller wants to make."""
resource_exhausted = partial(CallRefused, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""The caller has used up what a limit allows."""
aborted = partial(CallRefused, grpc.StatusCode.ABORTED)
"""The job's state does not allow it now. Nothing was done, and the caller may try again later."""
failed_precondition = partial(CallRefused, grpc.StatusCode.FAILED_PRECONDITION)
"""The caller can't be served before somebody changes something."""
unimplemented = partial(CallRefused, grpc.StatusCode.UNIMPLEMENTED)
"""The caller's version is not served. (A command that knows no versions takes FAILED_PRECONDITION for a wrong munge
key, and says so.)"""
deadline_exceeded = partial(CallRefused, grpc.StatusCode.DEADLINE_EXCEEDED)
"""The caller was silent for too long."""
unavailable = partial(CallRefused, grpc.StatusCode.UNAVAILABLE)
"""The answer needs something that does not answer now. The caller may try again."""
internal = partial(CallRefused, grpc.StatusCode.INTERNAL)
"""Muster's own fault, or its disk's."""


def run_has_ended(job: int, restarts: int) -> str:
    """The message to a process of an older run of `job`, which Slurm has restarted `restarts` times."""
    return f"Slurm has restarted job {job} (restart {restarts}): the run of this process has ended"
