"""What each call of the public API goes through: versions are compared, and a CallRefused of its handler ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, Protocol, TypeVar

from muster import compatibility
from muster.daemon.coordinator.services.callers_gangs import CallersGangs
from muster.daemon.coordinator.services.rpc_errors import unimplemented
from muster.daemon.transport.calls.call_messages import write_message
from muster.daemon.transport.calls.call_places import current_place
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.server_limits import StreamLimits

READING = frozenset(
    {"Describe", "Attend", "Watch", "List", "Events", "Nodes", "NodeHistory", "Measurements", "MeasureLink", "Account"}
)
"""The methods that change nothing. A caller of any version may call them: the wire leaves out what it does not know."""


class _Service(Protocol):
    stream_limits: StreamLimits

    @property
    def callers_gangs(self) -> CallersGangs:
        """Which gangs the caller may name."""
        ...

    @property
    def side(self) -> compatibility.Side:
        """What this coordinator says of its version."""
        ...


_Self = TypeVar("_Self", bound=_Service)
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


def unary_handler(
    handler: Callable[[_Self, _Request, Any], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """Decorates a handler with one reply: a CallRefused that it raises ends the call."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> _Reply:
        try:
            await _compare_versions(self.side, handler.__name__, context)
            await self.callers_gangs.learn_reader()
            return await handler(self, request, context)
        except CallRefused as error:
            await error.end_call(context)

    return wrapped


def stream_handler(
    handler: Callable[[_Self, _Request, Any], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """Decorates a handler with a stream of replies: a CallRefused that it raises ends the call, and so does a client
    that reads no reply. What the handler holds is freed first."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> None:
        try:
            await _compare_versions(self.side, handler.__name__, context)
            await self.callers_gangs.learn_reader()
            async with aclosing(handler(self, request, context)) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    await write_message(context, reply, self.stream_limits.unread_s)
        except CallRefused as error:
            await error.end_call(context)

    # wraps() would show gRPC an asynchronous generator.
    del wrapped.__wrapped__
    return wrapped  # type: ignore[return-value]  # gRPC lets a coroutine write its stream itself


async def _compare_versions(mine: compatibility.Side, method: str, context: Any) -> None:
    """Say this coordinator's version before all else. The caller compares, too: one that reads is answered.

    Raises:
        CallRefused: the caller does not fit, and wants to change something.
    """
    if place := current_place():
        await place.begin_answers(context, compatibility.metadata(mine))
        theirs = compatibility.read_metadata("the muster command", context.invocation_metadata())
        if method not in READING and (reason := compatibility.misfit(mine, theirs)):
            raise unimplemented(f"{reason}. Nothing was done")
