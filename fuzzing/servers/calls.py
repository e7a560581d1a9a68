"""An input as a sequence of calls, and making them.

    byte 0          the method, of the servers' methods
    byte 1          the caller: anonymous, or a user
    byte 2          how many messages follow, 0 to 7; 0 stands for one empty message
    each message    its length (2 bytes, little-endian), then its bytes

The rest of the input is further calls, up to MOST_CALLS. Each call is sent as it is, whatever the method expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.transport import call_binding
from muster.daemon.transport.call_binding import CREDENTIAL_KEY

MOST_CALLS = 6
MOST_MESSAGES = 8
DEADLINE_S = 60.0
"""Seconds. It only ends a wait that would never end."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `caller` is a number of the servers' list of callers."""

    method: str
    caller: int
    messages: tuple[bytes, ...]


def calls_of(data: bytes, methods: Sequence[str], callers: int) -> Iterator[Call]:
    """The calls of an input."""
    for _ in range(MOST_CALLS):
        if len(data) < 3:
            return
        method, caller, count, data = data[0], data[1], data[2] % MOST_MESSAGES, data[3:]
        messages = []
        for _ in range(count):
            end = 2 + int.from_bytes(data[:2], "little")
            messages.append(data[2:end])
            data = data[end:]
        # gRPC leaves a call of one message open for ever if the client ends its side without that message.
        yield Call(methods[method % len(methods)], caller % callers, tuple(messages) or (b"",))


async def make(call: Call, channel: grpc.aio.Channel, user: ChosenUser | None, server: str) -> None:
    """Makes the call and reads the first answer. A refusal is fine. `server`: the name that the credential names."""
    metadata = None
    if user:
        token = user.issue(call_binding.payload_of_call(call.method, server, call.messages[0]))
        metadata = grpc.aio.Metadata((CREDENTIAL_KEY, token))
    stream_of: Any = channel.stream_stream  # the stubs want serializers, and the messages are bytes already
    stream = stream_of(call.method)(_all(call.messages), metadata=metadata)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await anext(aiter(stream), None)
    except grpc.aio.AioRpcError:
        pass
    finally:
        stream.cancel()


async def _all(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
