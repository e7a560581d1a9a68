"""The open streams of agents: who is attached, and what waits to be sent to them.

An outbox holds at most one order, the newest: orders are levels. Everything else (pongs, probes) keeps its turn.

A node has one agent of a gang. Where a second process claims to be it, the first one's word decides: an agent that
speaks lives, and says something every 5 s at least.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from muster.daemon.host import clock
from muster.v1 import agent_pb2 as pb

MUTE_S = 7.0
"""Seconds without a word after which an open stream counts as dead: agents ping every 5 s."""


@dataclass(eq=False, slots=True)
class AgentStream:
    """One agent's stream. `put` never waits; `take` waits for the next message, None at the end.

    `ordered` is the newest message with an order that was put; `heard_at`: when the agent last said something, on the
    monotonic clock; `restart`: Slurm's count of restarts of the job that the agent belongs to.
    """

    gang: str
    node: str
    incarnation: str
    restart: int = 0
    heard_at: float = field(default_factory=clock.monotonic)
    ordered: pb.CoordinatorMessage | None = None
    _order: pb.CoordinatorMessage | None = None
    _others: deque[pb.CoordinatorMessage] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def put(self, message: pb.CoordinatorMessage) -> None:
        """Send `message`; a newer order takes the place of one that still waits."""
        if message.HasField("order"):
            self._order = self.ordered = message
        else:
            self._others.append(message)
        self._wake.set()

    def close(self) -> None:
        """End the stream once all that waits was sent."""
        self._closed = True
        self._wake.set()
        self._stirred.set()

    def heard(self) -> None:
        """The agent has said something."""
        self.heard_at = clock.monotonic()
        self._stirred.set()

    async def speaks(self) -> bool:
        """Wait for the agent's next word. False: the stream has ended, or has been mute for MUTE_S in all."""
        before = self.heard_at
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, before + MUTE_S - clock.monotonic())):
                while self.heard_at == before and not self._closed:
                    self._stirred.clear()
                    await self._stirred.wait()
        return self.heard_at > before and not self._closed

    async def take(self) -> pb.CoordinatorMessage | None:
        """The next message; orders come before anything else."""
        while True:
            if self._order is not None:
                message, self._order = self._order, None
                return message
            if self._others:
                return self._others.popleft()
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()


class AgentStreams:
    """The newest stream of each (gang, node)."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, AgentStream]] = {}

    def add(self, stream: AgentStream) -> None:
        """Count `stream` as its agent's; an earlier one of the same agent or node is ended."""
        of_gang = self._streams.setdefault(stream.gang, {})
        if before := of_gang.get(stream.node):
            before.close()
        of_gang[stream.node] = stream

    def remove(self, stream: AgentStream) -> bool:
        """Forget `stream`. False, and nothing happens, where a newer one has taken its place."""
        of_gang = self._streams.get(stream.gang, {})
        if of_gang.get(stream.node) is not stream:
            return False
        del of_gang[stream.node]
        if not of_gang:
            del self._streams[stream.gang]
        return True

    def drop(self, gang: str, node: str) -> None:
        """Send what waits, then end the stream of that agent, which counts as removed."""
        if stream := self.get(gang, node):
            self.remove(stream)
            stream.close()

    def get(self, gang: str, node: str) -> AgentStream | None:
        """The stream of the agent of `gang` on `node`."""
        return self._streams.get(gang, {}).get(node)

    def close(self) -> None:
        """End every stream."""
        for of_gang in self._streams.values():
            for stream in of_gang.values():
                stream.close()

    def of(self, gang: str) -> Iterator[AgentStream]:
        """The streams of a gang's agents."""
        yield from self._streams.get(gang, {}).values()
