"""A coordinator for tests and benchmarks: the real AgentService on a real port, with orders that the test gives.

The scripted coordinator decides nothing: a test gives the orders and waits for what the agents report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.server_limits import COORDINATOR
from muster.v1 import agent_pb2_grpc
from muster.v1.agent_pb2 import AgentHello, AgentMessage, AgentPing, AgentStatus, CoordinatorMessage, Order, ProbeOrder
from muster.v1.common_pb2 import Release


class SeenAgent:
    """One agent as its stream shows it: its hello, its newest status, and all its other messages."""

    def __init__(self, hello: AgentHello) -> None:
        self.hello = hello
        self.status = AgentStatus()
        self.messages: list[AgentMessage] = []
        self.outbox: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()


class ScriptedCoordinator(agent_pb2_grpc.AgentServiceServicer):
    """Call `start` first. `order` and `probe` send; `until` waits. Set `ignore_pings` to leave pings unanswered."""

    def __init__(self, credentials: Credentials) -> None:
        self.agents: dict[str, SeenAgent] = {}
        self.attached = 0
        self.ignore_pings = False
        self.term = 1
        self.release = Release()
        """What it says of its version; empty: nothing."""
        self._serial = 0
        self._orders: dict[str, Order] = {}
        self._news = asyncio.Condition()
        self._server = make_server(credentials, COORDINATOR)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)

    async def start(self, port: int = 0) -> str:
        """Listen on the loopback address; return "host:port"."""
        port = bind(self._server, f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Close all streams and stop listening."""
        await self._server.stop(grace=None)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[CoordinatorMessage]:
        """See agent.proto."""
        first = await anext(aiter(request_iterator))
        seen = SeenAgent(first.hello)
        self.attached += 1
        self.agents[first.hello.node] = seen
        if first.hello.node in self._orders:
            seen.outbox.put_nowait(self._message(order=self._orders[first.hello.node]))
        reading = asyncio.ensure_future(self._read(seen, request_iterator))
        await self._tell()
        try:
            while not reading.done():
                sending = asyncio.ensure_future(seen.outbox.get())
                await asyncio.wait([sending, reading], return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    yield sending.result()
                else:
                    sending.cancel()
        finally:
            reading.cancel()

    def order(self, order: Order, *nodes: str) -> int:
        """Give an order to `nodes` (no nodes: to all); return the order's serial."""
        self._serial += 1
        order.serial = self._serial
        for node in nodes or tuple(self.agents):
            self._orders[node] = order
            self.agents[node].outbox.put_nowait(self._message(order=order))
        return self._serial

    def probe(self, witness: str, order: ProbeOrder) -> None:
        """Order `witness` to probe."""
        self.agents[witness].outbox.put_nowait(self._message(probe=order))

    def dismiss(self, node: str, reason: str) -> None:
        """Dismiss the agent of `node`."""
        self.agents[node].outbox.put_nowait(self._message(dismissed=reason))

    async def until(self, what: Callable[[], bool], timeout: float = 120.0) -> None:
        """Wait until the condition `what` holds.

        Raises:
            TimeoutError: the condition did not hold within `timeout` seconds.
        """
        async with asyncio.timeout(timeout), self._news:
            await self._news.wait_for(what)

    def status(self, node: str) -> AgentStatus:
        """The newest status of `node`; an empty status before the first one."""
        return self.agents[node].status if node in self.agents else AgentStatus()

    def _message(self, **body: Any) -> CoordinatorMessage:
        release = self.release if self.release.protocol else None
        return CoordinatorMessage(term=self.term, release=release, **body)

    async def _read(self, seen: SeenAgent, messages: Any) -> None:
        async for message in messages:
            if message.WhichOneof("body") == "status":
                seen.status = message.status
            elif message.WhichOneof("body") == "ping":
                if not self.ignore_pings:
                    seen.outbox.put_nowait(self._message(pong=AgentPing(seq=message.ping.seq)))
            else:
                seen.messages.append(message)
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
