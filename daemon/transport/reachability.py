"""Is there a process behind this address, at least a kernel, or nothing? Asked by agents and by the coordinator alike.

A probe is a Ping and, beside it, bare TCP connections again and again, which tell a mute process (its kernel accepts)
from an ended one (its kernel refuses) and from nothing at all.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from enum import Enum

import grpc
import grpc.aio

from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.site_config import split_address
from muster.v1.common_pb2 import PingRequest
from muster.v1.common_pb2_grpc import ProbeServiceStub

_AGAIN_S = 0.1
_KNOCK_S = 0.25
_CLOSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
_SILENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class Reachability(Enum):
    """What a bare TCP connection meets."""

    ACCEPTED = "accepted"
    REFUSED = "refused or reset"
    NO_ANSWER = "no answer"


async def try_connection(address: str, timeout: float = _KNOCK_S) -> Reachability:
    """Try a TCP connection to "host:port" and close it at once."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Reachability.NO_ANSWER
    except OSError as error:
        # Unreachable (no route, no such host) says nothing about the process.
        return Reachability.REFUSED if error.errno in _CLOSED else Reachability.NO_ANSWER
    writer.transport.abort()
    return Reachability.ACCEPTED


async def probe(address: str, node: str, credentials: Credentials, deadline_s: float) -> Reachability | None:
    """What meets whoever asks after a process of `node` at `address` ("host:port"); None: it answers.

    It may be on its way out: a node that dies accepts connections for a moment longer. So its kernel's last word
    counts, not its first. An empty address (no such process was ever heard of) is MUTE.

    Raises:
        IdentityUnavailable: no credential can be made here; that is nobody else's silence.
    """
    if not address:
        return Reachability.NO_ANSWER
    door = before = None

    def ping() -> asyncio.Future[bool]:
        return asyncio.ensure_future(_ping(address, node, credentials, deadline_s))

    pings = {ping()}
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                before, door = door, await try_connection(address)
                if any(one.done() and one.result() for one in pings):
                    return None
                if door is Reachability.REFUSED:
                    return door
                if before is Reachability.NO_ANSWER and door is Reachability.ACCEPTED:
                    # What was sent into a cut link comes again after a second only, too late for most deadlines.
                    pings.add(ping())
                await asyncio.wait(pings, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                if any(one.done() and one.result() for one in pings):
                    return None
                pings = {one for one in pings if not one.done()}
                if not pings:
                    await asyncio.sleep(_AGAIN_S)
                    pings.add(ping())
    except TimeoutError:
        return door or Reachability.NO_ANSWER
    finally:
        for one in pings:
            one.cancel()
        await asyncio.gather(*pings, return_exceptions=True)


async def _ping(address: str, node: str, credentials: Credentials, deadline_s: float) -> bool:
    """On a channel of its own: no older back-off delays it."""
    nonce = secrets.token_hex(8)
    async with open_channel(address, credentials) as channel:
        try:
            reply = await ProbeServiceStub(channel).Ping(PingRequest(nonce=nonce), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            if isinstance(error.__cause__, IdentityUnavailable):
                raise error.__cause__ from None
            # Whoever refuses is alive: only silence and a broken connection are none.
            return error.code() not in _SILENT
    # Another node may have got this address since.
    return bool(reply.nonce == nonce and reply.node == node)
