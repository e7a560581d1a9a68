"""Whether a process answers at an address, only its kernel does, or nothing does. Agents and the coordinator both use
it, and agents and node daemons answer.

A probe is a Ping and, at the same time, repeated bare TCP connections. The connections show the difference between a
process that does not answer (its kernel accepts), a process that has ended (its kernel refuses), and nothing at all.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from muster.daemon.host.name_resolution import NameResolver
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.credential_check import REFUSED_KEY
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.site_config import split_address
from muster.daemon.transport.tls import Trust
from muster.v1.common_pb2 import PingReply, PingRequest
from muster.v1.common_pb2_grpc import ProbeServiceServicer, ProbeServiceStub

_RETRY_S = 0.1
_CONNECT_TIMEOUT_S = 0.25
OWN_SHARE = 0.5
"""Share of a probe's deadline that a service of this host may take: its name servers, and then its munged. Both answer
within milliseconds. One that hangs must fail before the deadline: otherwise the other process would seem to be
silent."""
_REFUSED_ERRNOS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
# FAILED_PRECONDITION: another process than the one that was meant has this address now.
_SILENT_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


@dataclass(frozen=True, slots=True)
class Probed:
    """The process that a probe asks: its address ("host:port"; empty: no such process was ever heard), the node that it
    must name, and its name as a server (`muster.daemon.transport.call_binding`)."""

    address: str
    node: str
    server: str


class Reachability(Enum):
    """The result of a bare TCP connection."""

    ACCEPTED = "accepted"
    REFUSED = "refused or reset"
    NO_ANSWER = "no answer"


class ProbeService(ProbeServiceServicer):
    """Answers that a process of this `role` ("agent", "musterd") is alive on `node`."""

    def __init__(self, node: str, role: str, incarnation: str) -> None:
        self._node, self._role, self._incarnation = node, role, incarnation

    async def Ping(self, request: PingRequest, context: Any) -> PingReply:
        """See common.proto."""
        return PingReply(nonce=request.nonce, node=self._node, role=self._role, incarnation=self._incarnation)


async def try_connection(address: str, timeout: float = _CONNECT_TIMEOUT_S) -> Reachability:
    """Try a TCP connection to "host:port" and close it at once. Nothing answers at what is no such address."""
    try:
        host, port = split_address(address)
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, ValueError):
        return Reachability.NO_ANSWER
    except OSError as error:
        # An unreachable host (no route, no such host) proves nothing about the process.
        return Reachability.REFUSED if error.errno in _REFUSED_ERRNOS else Reachability.NO_ANSWER
    writer.transport.abort()
    return Reachability.ACCEPTED


async def probe(
    probed: Probed,
    credentials: Credentials,
    deadline_s: float,
    trust: Trust | None = None,
    names: NameResolver | None = None,
) -> Reachability | None:
    """Probe a process. Return None if it answers, otherwise what the connections met. With `trust` it must prove that
    it is the process that was meant; None: plain text.

    A dying node may still accept connections for a moment, so the last result counts, not the first. What is no address
    is NO_ANSWER.

    Raises:
        IdentityUnavailable: no credential can be made here; that says nothing about the other process.
        NameUnresolved: no name server answers for the host of the address in half of the time, which says as little.
    """
    try:
        # Agents and daemons give IP addresses unless a site says otherwise.
        await (names or NameResolver()).ask(split_address(probed.address)[0], OWN_SHARE * deadline_s)
    except ValueError:
        return Reachability.NO_ANSWER  # gRPC would take port 65537 for port 1, where somebody else may answer
    current = previous = None

    def ping() -> asyncio.Future[bool]:
        return asyncio.ensure_future(_ping(probed, credentials, deadline_s, trust))

    pings = {ping()}
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                previous, current = current, await try_connection(probed.address)
                if any(task.done() and task.result() for task in pings):
                    return None
                if current is Reachability.REFUSED:
                    return current
                if previous is Reachability.NO_ANSWER and current is Reachability.ACCEPTED:
                    # TCP repeats what was lost in a cut link only after a second, too late for most deadlines: send a
                    # new ping.
                    pings.add(ping())
                await asyncio.wait(pings, timeout=_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
                if any(task.done() and task.result() for task in pings):
                    return None
                pings = {task for task in pings if not task.done()}
                if not pings:
                    await asyncio.sleep(_RETRY_S)
                    pings.add(ping())
    except TimeoutError:
        return current or Reachability.NO_ANSWER
    finally:
        for task in pings:
            task.cancel()
        await asyncio.gather(*pings, return_exceptions=True)


async def _ping(probed: Probed, credentials: Credentials, deadline_s: float, trust: Trust | None) -> bool:
    """Ping on a new channel, so that no earlier backoff delays it."""
    nonce = secrets.token_hex(8)
    identity_s = OWN_SHARE * deadline_s
    async with open_channel(
        probed.address, credentials, trust=trust, server=probed.server, identity_deadline_s=identity_s
    ) as channel:
        try:
            reply = await ProbeServiceStub(channel).Ping(PingRequest(nonce=nonce), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            if isinstance(error.__cause__, IdentityUnavailable):
                raise error.__cause__ from None
            # A process that refuses is alive, also if its host can't check credentials now (UNAVAILABLE): only silence
            # and a broken connection mean that it did not answer.
            return error.code() not in _SILENT_CODES or _is_refusal(error)
    # Another node may have this address now.
    return bool(reply.nonce == nonce and reply.node == probed.node)


def _is_refusal(error: grpc.aio.AioRpcError) -> bool:
    metadata: Any = error.trailing_metadata()  # a grpc.aio.Metadata, which grpc-stubs do not know
    return error.code() is grpc.StatusCode.UNAVAILABLE and REFUSED_KEY in metadata
