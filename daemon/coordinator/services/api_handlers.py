"""What each call of the public API goes through: an RpcAbort that its handler raises ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, Protocol, TypeVar

from muster.daemon.coordinator.services.rpc_errors import RpcAbort
from muster.daemon.transport.calls.call_messages import write_message
from muster.daemon.transport.server_limits import StreamLimits


class _Service(Protocol):
    stream_limits: StreamLimits


_Self = TypeVar("_Self", bound=_Service)
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


def stream_handler(
    handler: Callable[[_Self, _Request, Any], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """Decorates a handler with a stream of replies: an RpcAbort that it raises ends the call, and so does a client that
    reads no reply. What the handler holds is freed first."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> None:
        try:
            async with aclosing(handler(self, request, context)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    await write_message(context, reply, self.stream_limits.unread_s)
        except RpcAbort as error:
            await error.end_call(context)

    # wraps() would show gRPC an asynchronous generator.
    del wrapped.__wrapped__
    return wrapped  # type: ignore[return-value]  # gRPC lets a coroutine write its stream itself
