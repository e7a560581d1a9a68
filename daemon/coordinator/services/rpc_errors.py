"""Errors of the services: one exception with a gRPC status code and a message, which ends the call at the edge."""

from __future__ import annotations

import grpc

from muster.daemon.transport.calls.call_refused import CallRefused

RpcAbort = CallRefused


def permission_denied(message: str) -> RpcAbort:
    """The caller has no right to do this."""
    return RpcAbort(grpc.StatusCode.PERMISSION_DENIED, message)


def invalid_argument(message: str) -> RpcAbort:
    """A field of the message is wrong."""
    return RpcAbort(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_found(message: str) -> RpcAbort:
    """The named gang, job or node does not exist."""
    return RpcAbort(grpc.StatusCode.NOT_FOUND, message)


def already_exists(message: str) -> RpcAbort:
    """Something else has the place of what the caller wants to make."""
    return RpcAbort(grpc.StatusCode.ALREADY_EXISTS, message)


def resource_exhausted(message: str) -> RpcAbort:
    """The caller has used up what a limit allows."""
    return RpcAbort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def aborted(message: str) -> RpcAbort:
    """The job's state does not allow it now. Nothing was done, and the caller may try again later."""
    return RpcAbort(grpc.StatusCode.ABORTED, message)


def failed_precondition(message: str) -> RpcAbort:
    """The caller can't be served before somebody changes something."""
    return RpcAbort(grpc.StatusCode.FAILED_PRECONDITION, message)


def unimplemented(message: str) -> RpcAbort:
    """The caller's version is not served. (A command that knows no versions takes FAILED_PRECONDITION for a wrong munge
    key, and says so.)"""
    return RpcAbort(grpc.StatusCode.UNIMPLEMENTED, message)


def deadline_exceeded(message: str) -> RpcAbort:
    """The caller was silent for too long."""
    return RpcAbort(grpc.StatusCode.DEADLINE_EXCEEDED, message)


def unavailable(message: str) -> RpcAbort:
    """The answer needs something that does not answer now. The caller may try again."""
    return RpcAbort(grpc.StatusCode.UNAVAILABLE, message)


def internal(message: str) -> RpcAbort:
    """Muster's own fault, or its disk's."""
    return RpcAbort(grpc.StatusCode.INTERNAL, message)


def run_has_ended(job: int, restarts: int) -> str:
    """The message to a process of an older run of `job`, which Slurm has restarted `restarts` times."""
    return f"Slurm has restarted job {job} (restart {restarts}): the run of this process has ended"
