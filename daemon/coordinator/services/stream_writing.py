"""Writes the messages of a long-lived stream, and ends the stream of a client that does not read them.

gRPC accepts a message only while the client reads, so one message at most waits there. What else waits for the client
is bounded where it waits (shell/agent_streams.py, shell/subscriptions.py), and freed when the stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc.aio

from muster.daemon.coordinator.services.rpc_errors import RpcAbort, deadline_exceeded
from muster.daemon.transport.server_limits import StreamLimits


class _Service(Protocol):
    stream_limits: StreamLimits


_Self = TypeVar("_Self", bound=_Service)
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


async def write_message(context: grpc.aio.ServicerContext[Any, Any], message: object, unread_s: float) -> None:
    """Send `message`.

    Raises:
        RpcAbort: the client has read nothing for `unread_s`.
    """
    try:
        async with asyncio.timeout(unread_s):
            await context.write(message)
    except TimeoutError:
        raise deadline_exceeded(f"no message was read for {unread_s:g} s: open another stream") from None


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
