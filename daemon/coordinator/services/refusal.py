"""How the services say no: one exception with a gRPC status and a sentence, mapped at the edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio


class Refused(Exception):
    """The call ends with `code`; the words say what is wrong and what would be right."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code = code

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of `context` so."""
        await context.abort(self.code, str(self))
        raise AssertionError("abort raises")


def not_permitted(words: str) -> Refused:
    """The caller is not who may do that."""
    return Refused(grpc.StatusCode.PERMISSION_DENIED, words)


def nonsense(words: str) -> Refused:
    """The message can't be meant."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, words)


def not_found(words: str) -> Refused:
    """There is no such thing."""
    return Refused(grpc.StatusCode.NOT_FOUND, words)


def try_again(words: str) -> Refused:
    """Something that is needed for the answer doesn't answer now."""
    return Refused(grpc.StatusCode.UNAVAILABLE, words)


_Self = TypeVar("_Self")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


def answers(
    handler: Callable[[_Self, _Request, Any], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """A handler with one answer, whose Refused ends the call."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> _Reply:
        try:
            return await handler(self, request, context)
        except Refused as refused:
            await refused.abort(context)

    return wrapped


def streams(
    handler: Callable[[_Self, _Request, Any], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """A handler with a stream of answers, whose Refused ends the call."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> AsyncIterator[_Reply]:
        try:
            async with aclosing(handler(self, request, context)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    yield reply
        except Refused as refused:
            await refused.abort(context)

    return wrapped


def run_over(job: int, restarts: int) -> str:
    """For a process of an older run of `job`, which Slurm has started again for the `restarts`th time."""
    return f"job {job} was started again (restart {restarts}): this run of it is over"
