"""The open streams of agents: which agents are attached, and which messages wait to be sent to them.

A stream's outbox is bounded, whether the agent reads or not. It holds one order, the newest, because an order replaces
all orders before it; one pong, the newest, because a pong answers all pings before it; one probe order for each node,
because a new round of probes replaces the one before; and one order to measure a link, because a job has one at a time.

A gang has one agent on each node. If a second process claims to be that agent, messages from the first one decide: a
live agent sends a message at least every 5 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from muster.daemon.host import clock
from muster.v1 import agent_pb2 as pb

SILENT_STREAM_S = 7.0
"""Seconds without a message after which an open stream counts as dead: agents ping every 5 s."""

MAX_WAITING_PROBES = 256
"""Probe orders that wait in one outbox. If more are put, the oldest is dropped: a witness that does not answer is no
evidence."""


@dataclass(eq=False, slots=True)
class AgentOutbox:
    """One agent's stream. `put` never blocks. `next_message` waits for a message to send.

    `last_order` is the newest message with an order that was put. `heard_at`: the time of the agent's last message, on
    the monotonic clock. `restart_count`: Slurm's count of restarts of the agent's job. `misfit`: why an agent of this
    version carries no ranks; empty: it may.
    """

    gang: str
    node: str
    incarnation: str
    restart_count: int = 0
    misfit: str = ""
    heard_at: float = field(default_factory=clock.monotonic)
    last_order: pb.CoordinatorMessage | None = None
    _order: pb.CoordinatorMessage | None = None
    _pong: pb.CoordinatorMessage | None = None
    _measure: pb.CoordinatorMessage | None = None
    _probes: dict[str, pb.CoordinatorMessage] = field(default_factory=dict)
    _outbox_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _heard_or_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def put(self, message: pb.CoordinatorMessage) -> None:
        """Send `message`: an order, a probe order, a pong or an order to measure.

        It replaces an older one that waits (see the module).
        """
        match message.WhichOneof("body"):
            case "order":
                self._order = self.last_order = message
            case "pong":
                self._pong = message
            case "probe":
                self._put_probe(message)
            case "measure":
                self._measure = message
            case kind:
                raise ValueError(f"{kind} is no message for an outbox")
        self._outbox_changed.set()

    def _put_probe(self, message: pb.CoordinatorMessage) -> None:
        self._probes.pop(message.probe.node, None)
        if len(self._probes) >= MAX_WAITING_PROBES:
            del self._probes[next(iter(self._probes))]
        self._probes[message.probe.node] = message

    def close(self) -> None:
        """End the stream once all waiting messages were sent."""
        self._closed = True
        self._outbox_changed.set()
        self._heard_or_closed.set()

    def note_heard(self) -> None:
        """Note that the agent has sent a message."""
        self.heard_at = clock.monotonic()
        self._heard_or_closed.set()

    async def wait_until_heard(self) -> bool:
        """Wait for the agent's next message. False: the stream was closed, or was silent for SILENT_STREAM_S in all."""
        before = self.heard_at
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, before + SILENT_STREAM_S - clock.monotonic())):
                while self.heard_at == before and not self._closed:
                    self._heard_or_closed.clear()
                    await self._heard_or_closed.wait()
        return self.heard_at > before and not self._closed

    async def next_message(self) -> pb.CoordinatorMessage | None:
        """Wait for the next message to send: an order, then probe orders, then a pong, then a measurement.

        Returns: None: the stream was closed and the outbox is empty.
        """
        while True:
            if self._order is not None:
                message, self._order = self._order, None
                return message
            if self._probes:
                return self._probes.pop(next(iter(self._probes)))
            if self._pong is not None:
                message, self._pong = self._pong, None
                return message
            if self._measure is not None:
                message, self._measure = self._measure, None
                return message
            if self._closed:
                return None
            self._outbox_changed.clear()
            await self._outbox_changed.wait()


class AgentStreams:
    """The newest stream of each (gang, node)."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, AgentOutbox]] = {}

    def add(self, stream: AgentOutbox) -> None:
        """Add `stream`. Closes an earlier stream of the same gang and node."""
        of_gang = self._streams.setdefault(stream.gang, {})
        if before := of_gang.get(stream.node):
            before.close()
        of_gang[stream.node] = stream

    def remove(self, stream: AgentOutbox) -> bool:
        """Remove `stream`. False, and nothing happens, if a newer stream has replaced it."""
        of_gang = self._streams.get(stream.gang, {})
        if of_gang.get(stream.node) is not stream:
            return False
        del of_gang[stream.node]
        if not of_gang:
            del self._streams[stream.gang]
        return True

    def drop(self, gang: str, node: str) -> None:
        """Remove the stream of that agent, and close it once its waiting messages were sent."""
        if stream := self.get(gang, node):
            self.remove(stream)
            stream.close()

    def get(self, gang: str, node: str) -> AgentOutbox | None:
        """The stream of the agent of `gang` on `node`."""
        return self._streams.get(gang, {}).get(node)

    def close(self) -> None:
        """Close every stream."""
        for of_gang in self._streams.values():
            for stream in of_gang.values():
                stream.close()

    def of_gang(self, gang: str) -> Iterator[AgentOutbox]:
        """The streams of a gang's agents."""
        yield from self._streams.get(gang, {}).values()
