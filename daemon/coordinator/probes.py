"""Asks after a silent node: the coordinator's own two probes, and orders to other agents to probe for it.

The coordinator's own probe is a Ping and, beside it, a bare TCP connect, which tells a mute process (its kernel
accepts) from an ended one (its kernel refuses) and from nothing at all. A probe without an answer at the deadline is
NO_ANSWER. An agent that was asked and doesn't answer the coordinator says nothing about anybody: it posts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import grpc
import grpc.aio

from muster.daemon.channel import open_channel
from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core.events import Silence
from muster.daemon.coordinator.core.sight import AGENT, MUSTERD
from muster.daemon.coordinator.core.turn import Ask
from muster.daemon.coordinator.streams import AgentStreams
from muster.daemon.identity import Credentials, IdentityUnavailable
from muster.v1 import agent_pb2, common_pb2, common_pb2_grpc

_AGAIN_S = 0.1
_SILENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_log = logging.getLogger(__name__)


class Prober:
    """Carries out Asks; every answer becomes a Probed."""

    def __init__(
        self, credentials: Credentials, streams: AgentStreams, term: int, post: Callable[[e.Event], None]
    ) -> None:
        self._credentials = credentials
        self._streams = streams
        self._term = term
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ask: Ask) -> None:
        """Ask every witness; returns at once."""
        for witness in ask.witnesses:
            if witness in (AGENT, MUSTERD):
                task = asyncio.create_task(self._own(ask, witness))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif stream := self._streams.get(ask.gang, witness):
                stream.put(agent_pb2.CoordinatorMessage(term=self._term, probe=_order(ask)))

    async def aclose(self) -> None:
        """Drop the probes under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _own(self, ask: Ask, witness: str) -> None:
        address = ask.peer_address if witness == AGENT else ask.probe_address
        try:
            silence = await probe(address, ask.node, self._credentials, ask.deadline_s)
        except IdentityUnavailable as error:
            _log.error("can't probe %s on %s: %s", witness, ask.node, error)
            return
        self._post(e.Probed(ask.gang, ask.probe, witness, ask.node, silence))


async def probe(address: str, node: str, credentials: Credentials, deadline_s: float) -> Silence | None:
    """Whether a process of `node` answers behind `address` ("host:port") within `deadline_s`; None: it does.

    An empty address (no such process was ever heard of) is NO_ANSWER.
    """
    if not address:
        return Silence.NO_ANSWER
    accepted = False
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                said = await _knock(address)
                if said is Silence.CLOSED:
                    return said
                accepted |= said is Silence.KERNEL_ONLY
                if await _ping(address, node, credentials, deadline_s):
                    return None
                await asyncio.sleep(_AGAIN_S)  # it may be on its way out: its kernel will say so
    except TimeoutError:
        return Silence.KERNEL_ONLY if accepted else Silence.NO_ANSWER


async def _knock(address: str) -> Silence:
    """What the kernel says to a connection."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (ConnectionRefusedError, ConnectionResetError):
        return Silence.CLOSED
    except OSError:
        return Silence.NO_ANSWER
    writer.transport.abort()
    return Silence.KERNEL_ONLY


async def _ping(address: str, node: str, credentials: Credentials, deadline_s: float) -> bool:
    """Raises IdentityUnavailable: no credential can be made here; that is nobody else's silence."""
    nonce = secrets.token_hex(8)
    async with open_channel(address, credentials) as channel:
        stub = common_pb2_grpc.ProbeServiceStub(channel)
        try:
            reply = await stub.Ping(common_pb2.PingRequest(nonce=nonce), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            if isinstance(error.__cause__, IdentityUnavailable):
                raise error.__cause__ from None
            # Whoever refuses is alive: only silence and a broken connection are none.
            return error.code() not in _SILENT
    # Another node may have got this address since.
    return bool(reply.nonce == nonce and reply.node == node)


def _order(ask: Ask) -> agent_pb2.ProbeOrder:
    return agent_pb2.ProbeOrder(
        probe_id=ask.probe,
        node=ask.node,
        peer_address=ask.peer_address,
        deadline_ms=round(ask.deadline_s * 1000),
    )
