"""Reads the messages of one long-lived stream: at a limited rate, and only while its sender says something.

A sender above the rate is read slowly, and loses nothing. Its messages wait in its own process, because HTTP/2 lets a
connection send no more than the server has room for. Nobody else waits: the event loop is free meanwhile.

A stream whose sender says nothing ends, so a connection that is half open costs nothing for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from muster.daemon.coordinator.services.rpc_errors import deadline_exceeded
from muster.daemon.host import clock
from muster.daemon.transport.server_limits import StreamLimits

SILENCE_CHECKS = 4
"""The silence of a stream is measured in so many parts. A coordinator that was suspended notes one part at most, so it
does not end the streams of senders that spoke meanwhile."""


class _Message(Protocol):
    def ByteSize(self) -> int: ...


_M = TypeVar("_M", bound=_Message)


class MessageRate:
    """Counts the messages of one stream. A large message counts as several."""

    def __init__(self, limits: StreamLimits, now: float) -> None:
        self._limits = limits
        self._left = float(limits.burst)
        self._at = now

    def note(self, size: int, now: float) -> float:
        """Note a message of `size` bytes. Returns the seconds to wait before the next message is read."""
        refilled = self._left + (now - self._at) * self._limits.messages_per_s
        self._left = min(refilled, self._limits.burst) - 1 - size / self._limits.bytes_per_message
        self._at = now
        return max(0.0, -self._left / self._limits.messages_per_s)


async def read_messages(
    messages: AsyncIterator[_M], limits: StreamLimits, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncIterator[_M]:
    """The messages of a stream after its first ones.

    Raises:
        CallRefused: no message came for `limits.silent_s`.
    """
    rate = MessageRate(limits, clock.monotonic())
    while (message := await _next(messages, limits.silent_s)) is not None:
        yield message
        if wait := rate.note(message.ByteSize(), clock.monotonic()):
            await sleep(wait)


async def _next(messages: AsyncIterator[_M], silent_s: float) -> _M | None:
    # A task, because a read that is cancelled may lose its message.
    reading = asyncio.ensure_future(anext(messages, None))
    try:
        for _ in range(SILENCE_CHECKS):
            done, _ = await asyncio.wait({reading}, timeout=silent_s / SILENCE_CHECKS)
            if done:
                return reading.result()
        raise deadline_exceeded(f"no message for {silent_s:g} s: open another stream")
    finally:
        reading.cancel()
