"""One link: pings to one other agent over one long-lived stream, opened again whenever it breaks."""

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
from muster.daemon.host import clock
from muster.daemon.transport.channel import raise_if_cancelled
from muster.daemon.transport.reachability import Reachability, try_connection
from muster.v1.peer_pb2 import LinkPing, LinkPong

if TYPE_CHECKING:
    from muster.daemon.agent.failure_detector.peers import OpenLink

_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """Whose link this is: the gang, this node, the other's node and address."""

    gang: str
    own_node: str
    peer_node: str
    peer_address: str


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What a link tells. `generation`: asked for, that of this agent's newest order. `pong`: an answer has come.
    `closed`: the other's kernel has closed the connection, or takes none."""

    generation: Callable[[], int]
    pong: Callable[[str, LinkPong], None]
    closed: Callable[[str], None]


class PeerLink:
    """Pings `ends.node` every `period` seconds, which may be changed at any time.

    contact: when the newest answered ping was sent; before the first answer, when the pinging began.
    answered: this connection has brought an answer.
    closed: the last connection was closed from the other side, and none was accepted since.
    """

    def __init__(self, ends: LinkEndpoints, open_link: OpenLink, hooks: LinkCallbacks) -> None:
        self.endpoints = ends
        self.period = silence_rules.NEIGHBOUR_PING_S
        self.last_contact = clock.monotonic()
        self.answered = False
        self.closed_by_peer = False
        self._open_link = open_link
        self._hooks = hooks
        self._seqs = itertools.count(1)
        self._sent: dict[int, float] = {}
        self._hurry = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def set_period(self, period: float) -> None:
        """Ping every `period` seconds from now on, starting now."""
        if period != self.period:
            self.period = period
            self._hurry.set()

    def stop(self) -> None:
        """End the link."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.answered = False
            with suppress(grpc.aio.AioRpcError):
                await self._talk(await self._open_link(self.endpoints.peer_address))
            raise_if_cancelled()
            await self._after_end()

    async def _talk(self, call: Any) -> None:
        pinging = asyncio.ensure_future(self._ping(call))
        try:
            async for pong in call:
                self._answered(pong)
        finally:
            pinging.cancel()
            call.cancel()

    async def _ping(self, call: Any) -> None:
        self._sent.clear()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                seq = next(self._seqs)
                ping = LinkPing(
                    gang_id=self.endpoints.gang,
                    node=self.endpoints.own_node,
                    generation=self._hooks.generation(),
                    seq=seq,
                )
                self._sent[seq] = clock.monotonic()
                await call.write(ping)
                self._hurry.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.period):
                        await self._hurry.wait()

    def _answered(self, pong: LinkPong) -> None:
        sent = self._sent.pop(pong.seq, None)
        if sent is None:
            return
        for older in [seq for seq in self._sent if seq < pong.seq]:
            del self._sent[older]
        self.last_contact, self.answered, self.closed_by_peer = sent, True, False
        self._hooks.pong(self.endpoints.peer_node, pong)

    async def _after_end(self) -> None:
        """A stream that had answers ends by the other kernel's word alone (keepalive is off): the process has ended, or
        closed it. That is told at once, for the coordinator waits for no silence where two kernels' words agree; a
        process that lives is found by the probes that follow."""
        if self.answered and not self.closed_by_peer:
            self.closed_by_peer = True
            self._hooks.closed(self.endpoints.peer_node)
        door = await try_connection(self.endpoints.peer_address)
        if door is Reachability.ACCEPTED:
            self.closed_by_peer = False
        elif door is Reachability.REFUSED and not self.closed_by_peer:
            self.closed_by_peer = True
            self._hooks.closed(self.endpoints.peer_node)
        await asyncio.sleep(_AGAIN_S)
