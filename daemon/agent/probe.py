"""Is there a process behind this address, at least a kernel, or nothing?"""

from __future__ import annotations

import asyncio
import errno
import secrets
from enum import Enum

import grpc
import grpc.aio

from muster.daemon.channel import open_channel
from muster.daemon.identity import Credentials
from muster.daemon.site import split_address
from muster.v1.agent_pb2 import Silence
from muster.v1.common_pb2 import PingRequest
from muster.v1.common_pb2_grpc import ProbeServiceStub

_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})


class Door(Enum):
    """What a bare TCP connection meets."""

    OPEN = "accepted"
    CLOSED = "refused or reset"
    MUTE = "no answer"


async def knock(address: str, timeout: float) -> Door:
    """Try a TCP connection to "host:port" and close it at once."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Door.MUTE
    except OSError as error:
        # Unreachable (no route, no such host) says nothing about the process.
        return Door.CLOSED if error.errno in _REFUSED else Door.MUTE
    writer.transport.abort()
    return Door.OPEN


async def ask(address: str, node: str, credentials: Credentials, timeout: float) -> bool:
    """Whether the agent of `node` answers at `address`. On a channel of its own: no older back-off delays it."""
    nonce = secrets.token_hex(8)
    async with open_channel(address, credentials) as channel:
        try:
            reply = await ProbeServiceStub(channel).Ping(PingRequest(nonce=nonce), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.nonce == nonce and reply.node == node)


async def probe(address: str, node: str, credentials: Credentials, timeout: float) -> Silence.ValueType | None:
    """How the agent of `node` is silent, within `timeout` seconds; None: it answers."""
    asking = asyncio.ensure_future(ask(address, node, credentials, timeout))
    try:
        door = await knock(address, timeout)
        if door is Door.CLOSED and not asking.done():
            return Silence.SILENCE_CLOSED
        if await asking:
            return None
    finally:
        asking.cancel()
    return {
        Door.OPEN: Silence.SILENCE_KERNEL_ONLY,
        Door.CLOSED: Silence.SILENCE_CLOSED,
        Door.MUTE: Silence.SILENCE_NO_ANSWER,
    }[door]
