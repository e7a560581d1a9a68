"""One link: pings one other agent over one stream, which is reopened whenever it breaks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.host import clock
from muster.daemon.transport.channel import raise_if_cancelled
from muster.daemon.transport.reachability import Reachability, try_connection
from muster.v1.peer_pb2 import LinkPing, LinkPong

if TYPE_CHECKING:
    from muster.daemon.agent.failure_detector.peers import OpenLink

_RECONNECT_S = 0.1


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """The two ends of a link: the gang, this agent's node, the peer's node and address."""

    gang: str
    own_node: str
    peer_node: str
    peer_address: str


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What a link calls.

    generation: returns the generation of this agent's newest order.
    pong: an answer has arrived from this node.
    closed: this node's kernel has closed or refused the connection.
    versions: what this agent says of its version; is told what the peer says; None: neither.
    """

    generation: Callable[[], int]
    pong: Callable[[str, LinkPong], None]
    closed: Callable[[str], None]
    versions: VersionCheck | None = None


class PeerLink:
    """Pings the peer every `period` seconds.

    last_contact: monotonic seconds at which the newest answered ping was sent; before the first answer: when the link
        began.
    answered: the current connection has brought an answer.
    closed_by_peer: the peer's kernel closed the last connection and has accepted none since.
    """

    def __init__(self, ends: LinkEndpoints, open_link: OpenLink, callbacks: LinkCallbacks) -> None:
        self.endpoints = ends
        self.period = silence_rules.WATCHED_PEER_PING_S
        self.last_contact = clock.monotonic()
        self.answered = False
        self.closed_by_peer = False
        self._open_link = open_link
        self._callbacks = callbacks
        self._seqs = itertools.count(1)
        self._pings_sent: dict[int, float] = {}
        self._period_changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def set_period(self, period: float) -> None:
        """Ping every `period` seconds from now on, starting at once."""
        if period != self.period:
            self.period = period
            self._period_changed.set()

    def stop(self) -> None:
        """Close the link."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.answered = False
            with suppress(grpc.aio.AioRpcError):
                first, ends = self._next_ping(), self.endpoints
                if self._callbacks.versions:
                    first.release.CopyFrom(self._callbacks.versions.release)
                await self._exchange(await self._open_link(ends.peer_node, ends.peer_address, first), first)
            raise_if_cancelled()
            await self._check_closed()

    async def _exchange(self, call: Any, first: LinkPing) -> None:
        pinging = asyncio.ensure_future(self._ping(call, first))
        try:
            async for pong in call:
                self._on_pong(pong)
        finally:
            pinging.cancel()
            call.cancel()

    def _next_ping(self) -> LinkPing:
        return LinkPing(
            gang_id=self.endpoints.gang,
            node=self.endpoints.own_node,
            generation=self._callbacks.generation(),
            seq=next(self._seqs),
        )

    async def _ping(self, call: Any, first: LinkPing) -> None:
        self._pings_sent.clear()
        ping = first
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                self._pings_sent[ping.seq] = clock.monotonic()
                await call.write(ping)
                self._period_changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.period):
                        await self._period_changed.wait()
                ping = self._next_ping()

    def _on_pong(self, pong: LinkPong) -> None:
        sent = self._pings_sent.pop(pong.seq, None)
        if sent is None:
            return
        for older in [seq for seq in self._pings_sent if seq < pong.seq]:
            del self._pings_sent[older]
        if not self.answered and self._callbacks.versions:
            self._callbacks.versions.meet_agent(self.endpoints.peer_node, pong.release)
        self.last_contact, self.answered, self.closed_by_peer = sent, True, False
        self._callbacks.pong(self.endpoints.peer_node, pong)

    async def _check_closed(self) -> None:
        """Find out why the stream ended, and report a closed connection at once.

        gRPC's keepalive is off, so a stream with answers ends only because the peer's kernel closed it: the peer
        process has ended or closed the stream. The coordinator need not wait for silence if two agents report that. The
        coordinator's probes find a process that is alive.
        """
        if self.answered and not self.closed_by_peer:
            self.closed_by_peer = True
            self._callbacks.closed(self.endpoints.peer_node)
        reachability = await try_connection(self.endpoints.peer_address)
        if reachability is Reachability.ACCEPTED:
            self.closed_by_peer = False
        elif reachability is Reachability.REFUSED and not self.closed_by_peer:
            self.closed_by_peer = True
            self._callbacks.closed(self.endpoints.peer_node)
        await asyncio.sleep(_RECONNECT_S)
