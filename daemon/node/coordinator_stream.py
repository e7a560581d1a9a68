"""The node's stream to the coordinator: hello, then heartbeats and signals, each answered in turn.

The stream is opened again whenever it ends or falls silent, for ever, after a pause of 100 ms that doubles
up to 2 s (with jitter, so that a thousand nodes do not come back in one beat). Signals wait in the outbox
until they are answered. An answer with a lower term than one seen before comes from a coordinator that was
replaced: it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from muster.daemon.node.outbox import Outbox
from muster.daemon.node.sensors.sensor import Observation
from muster.daemon.transport.channel import credential_metadata, open_first_ready_channel, raise_if_cancelled
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import split_addresses
from muster.v1 import node_pb2 as pb
from muster.v1 import node_pb2_grpc

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """Seconds. The answer to hello may have to wait for Slurm; every other answer is immediate."""

    hello_timeout_s: float = 30.0
    answer_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0

    def backoffs(self) -> Iterator[float]:
        """How long to wait before each further try: doubling, each between half and the whole of it."""
        pause = self.first_backoff_s
        while True:
            yield random.uniform(pause / 2, pause)
            pause = min(2 * pause, self.max_backoff_s)


class KeptGangs(Protocol):
    """What is kept on this node of jobs that are requeued (kept_memory_store.KeptMemoryStore)."""

    def kept(self) -> list[tuple[str, int]]: ...
    def mark_obsolete(self, gang: str, generation: int) -> None: ...


class StreamLost(Exception):
    """The stream is no good any more; says why."""


@dataclass(slots=True)
class _Exchange:
    """One stream: what was sent and not answered yet (None: no signal), whether it was welcomed, whether it ended."""

    unanswered: deque[Observation | None] = field(default_factory=deque)
    welcome: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False


class NodeStream:
    """Keeps one node attached. `hello` is asked for at each attach: addresses may change. It may raise OSError."""

    def __init__(
        self,
        coordinator: str,
        credentials: Credentials,
        hello: Callable[[], Awaitable[pb.NodeHello]],
        heartbeat_s: float,
        memory: KeptGangs,
        patience: StreamTimeouts = StreamTimeouts(),  # frozen
    ) -> None:
        self._coordinator = coordinator
        self._credentials = credentials
        self._hello = hello
        self._heartbeat_s = heartbeat_s
        self._memory = memory
        self._patience = patience
        self._outbox = Outbox()
        self._seq = 0
        self._term = 0
        self._trouble = ""

    def report(self, observation: Observation) -> None:
        """Send an observation now, or as soon as the coordinator is there."""
        self._outbox.put(observation)

    async def run(self) -> None:
        """Stay attached until cancelled."""
        waits = self._patience.backoffs()
        while True:
            try:
                hello = await self._hello()
                async with await open_first_ready_channel(
                    split_addresses(self._coordinator), self._credentials
                ) as channel:
                    async for _ in self._stream(channel, hello):
                        waits = self._patience.backoffs()
            except (StreamLost, grpc.aio.AioRpcError, OSError) as error:
                raise_if_cancelled()
                self._complain(_words(error))
                await asyncio.sleep(next(waits))

    def _complain(self, words: str) -> None:
        """Say once what is wrong, not at every try."""
        if words != self._trouble:
            _log.warning("not attached to %s, going on trying: %s", self._coordinator, words)
        self._trouble = words

    async def _stream(self, channel: grpc.aio.Channel, hello: pb.NodeHello) -> AsyncIterator[pb.NodeOrder]:
        """One stream: yields each answer after it was taken in.

        Raises:
            StreamLost, grpc.aio.AioRpcError, OSError: it ended.
        """
        self._outbox.rewind()
        exchange = _Exchange()
        metadata = await credential_metadata(self._credentials, "/muster.v1.NodeService/Attach")
        call = node_pb2_grpc.NodeServiceStub(channel).Attach(self._messages(hello, exchange), metadata=metadata)
        try:
            allowed, first = self._patience.hello_timeout_s, True
            while True:
                order = await _read(call, allowed)
                self._take_in(order, exchange)
                if first:
                    self._trouble, first = "", False
                    _log.info(
                        "attached to %s, term %d, heartbeat %g s", self._coordinator, order.term, self._heartbeat_s
                    )
                allowed = self._heartbeat_s + self._patience.answer_timeout_s
                yield order
        finally:
            # gRPC leaves the generator of messages where it waits: let it end, and take nothing more from the outbox.
            exchange.over = True
            exchange.welcome.set()
            self._outbox.changed.set()
            call.cancel()

    async def _messages(self, hello: pb.NodeHello, exchange: _Exchange) -> AsyncIterator[pb.NodeMessage]:
        """What is sent: hello, then a heartbeat at each beat and signals as they come."""
        loop = asyncio.get_running_loop()
        exchange.unanswered.append(None)
        yield pb.NodeMessage(hello=hello)
        await exchange.welcome.wait()  # a refusal is heard only by a caller that isn't writing
        beat = loop.time()
        while not exchange.over:
            if observation := self._outbox.next_unsent():
                exchange.unanswered.append(observation)
                yield pb.NodeMessage(signal=observation.message())
            elif loop.time() >= beat:
                beat = loop.time() + self._heartbeat_s
                self._seq += 1
                exchange.unanswered.append(None)
                kept = [pb.KeptGang(gang_id=gang, generation=newest) for gang, newest in self._memory.kept()]
                yield pb.NodeMessage(heartbeat=pb.Heartbeat(seq=self._seq, kept=kept))
            else:
                beat = min(beat, loop.time() + self._heartbeat_s)  # a faster one may have been asked for
                await _until(self._outbox.changed, beat)

    def _take_in(self, order: pb.NodeOrder, exchange: _Exchange) -> None:
        """Believe an answer; answers come in the order of the messages."""
        if order.term < self._term:
            raise StreamLost(
                f"it answers with term {order.term}, but term {self._term} was seen: an older coordinator is still"
                " running (if its journal was begun anew, restart musterd)"
            )
        self._term = order.term
        exchange.welcome.set()
        if exchange.unanswered and (observation := exchange.unanswered.popleft()):
            self._outbox.confirm(observation)
        for gang in order.over:
            self._memory.mark_obsolete(gang.gang_id, gang.generation)
        if order.heartbeat_s > 0 and order.heartbeat_s != self._heartbeat_s:
            self._heartbeat_s = order.heartbeat_s
            self._outbox.changed.set()


async def _read(call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.NodeOrder], allowed: float) -> pb.NodeOrder:
    try:
        async with asyncio.timeout(allowed):
            order = await call.read()
    except TimeoutError:
        raise StreamLost(f"no answer for {allowed:g} s") from None
    if not isinstance(order, pb.NodeOrder):
        raise StreamLost("it closed the stream")
    return order


async def _until(event: asyncio.Event, moment: float) -> None:
    """Wait for the event, but not longer than to `moment` of the loop's clock."""
    try:
        async with asyncio.timeout_at(moment):
            await event.wait()
    except TimeoutError:
        pass


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
