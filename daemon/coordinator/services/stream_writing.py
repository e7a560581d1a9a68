"""Writes the messages of a long-lived stream, and ends the stream of a client that does not read them.

gRPC accepts a message only while the client reads, so one message at most waits there. What else waits for the client
is bounded where it waits (shell/agent_streams.py, shell/subscriptions.py), and freed when the stream ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from muster.daemon.coordinator.services.rpc_errors import deadline_exceeded


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
