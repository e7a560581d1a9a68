"""Errors of the services: one exception with a gRPC status code and a message, which ends the call at the edge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio


class RpcAbort(Exception):
    """Ends the call with `code`. The message says what is wrong and what would be right."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    async def end_call(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of `context` with this error."""
        await context.abort(self.code, str(self))
        raise AssertionError("abort raises")


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


def deadline_exceeded(message: str) -> RpcAbort:
    """The caller was silent for too long."""
    return RpcAbort(grpc.StatusCode.DEADLINE_EXCEEDED, message)


def unavailable(message: str) -> RpcAbort:
    """The answer needs something that does not answer now. The caller may try again."""
    return RpcAbort(grpc.StatusCode.UNAVAILABLE, message)


_Self = TypeVar("_Self")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


def unary_handler(
    handler: Callable[[_Self, _Request, Any], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """Decorates a handler with one reply: an RpcAbort that it raises ends the call."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> _Reply:
        try:
            return await handler(self, request, context)
        except RpcAbort as error:
            await error.end_call(context)

    return wrapped


def run_has_ended(job: int, restarts: int) -> str:
    """The message to a process of an older run of `job`, which Slurm has restarted `restarts` times."""
    return f"Slurm has restarted job {job} (restart {restarts}): the run of this process has ended"
