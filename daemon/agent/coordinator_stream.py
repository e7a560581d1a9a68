"""The stream to the coordinator: hello, whole statuses up, orders and probes down; opened again for ever.

Training never waits for it: without a coordinator the ranks run on, and what has changed meanwhile is said at the next
attach.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.host import clock
from muster.daemon.transport.channel import credential_metadata, open_first_ready_channel, raise_if_cancelled
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import split_addresses
from muster.v1.agent_pb2 import AgentHello, AgentMessage, AgentPing, AgentStatus, CoordinatorMessage, Order, ProbeOrder
from muster.v1.agent_pb2_grpc import AgentServiceStub

log = logging.getLogger(__name__)

# Slow while all is well; in a spell of silence as fast as the members are pinged.
_CALM_PING_S = 5.0
# A coordinator that has not answered three of them is dialled anew; where another one may have taken over, sooner.
_DEAF_S, _DEAF_OF_SEVERAL_S = 16.0, 7.0
_BACKOFF_S = (0.05, 1.0)
_REFUSED_S = 5.0
_SAY_S = 10.0
_ATTACH = "/muster.v1.AgentService/Attach"
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(frozen=True, slots=True)
class StreamHandlers:
    """Who listens to the coordinator, and who says how things stand. `attached`: a new stream is open, to a coordinator
    that may know nothing of what was said before."""

    hello: AgentHello
    status: Callable[[], AgentStatus]
    attached: Callable[[], None]
    order: Callable[[Order], None]
    probe: Callable[[ProbeOrder], None]
    dismissed: Callable[[str], None]


class AgentStream:
    """The agent's side of AgentService.Attach.

    contact: when the newest answered ping was sent, on the monotonic clock; minus infinity: never.
    """

    def __init__(self, address: str, credentials: Credentials, ears: StreamHandlers) -> None:
        self.last_contact = float("-inf")
        self._address = address
        self._deaf_s = _DEAF_OF_SEVERAL_S if len(split_addresses(address)) > 1 else _DEAF_S
        self._credentials = credentials
        self._ears = ears
        self._outbox: deque[AgentMessage] = deque()
        # When the status is to be sent; infinity: it has not changed.
        self._due = float("-inf")
        self._wake = asyncio.Event()
        self._seqs = itertools.count(1)
        self._sent: dict[int, float] = {}
        self._period = _CALM_PING_S
        self._term = 0
        self._backoff = _BACKOFF_S[0]
        self._said = float("-inf")
        # Why this side has ended the stream.
        self._given_up = ""

    def schedule_status(self, within: float = 0.0) -> None:
        """The status has changed: send it, once for all changes until then, `within` seconds."""
        due = clock.monotonic() + within
        if due < self._due:
            self._due = due
            self._wake.set()

    def send(self, message: AgentMessage) -> None:
        """Send a message that a status does not hold; lost where no stream is open."""
        self._outbox.append(message)
        self._wake.set()

    def set_suspicion(self, worried: bool) -> None:
        """Ping often, or seldom again."""
        self._period = silence_rules.SUSPICION_PING_S if worried else _CALM_PING_S
        self._wake.set()

    async def run(self) -> None:
        """Attach, for ever."""
        while True:
            wait = await self._attach_once()
            raise_if_cancelled()
            await asyncio.sleep(wait)

    async def _attach_once(self) -> float:
        """One stream from its opening to its end; returns how long to wait before the next."""
        async with await open_first_ready_channel(split_addresses(self._address), self._credentials) as channel:
            self._given_up = ""
            try:
                metadata = await credential_metadata(self._credentials, _ATTACH)
                await self._talk(AgentServiceStub(channel).Attach(metadata=metadata))  # type: ignore[call-arg]
                return self._pause("the coordinator has ended the stream")
            except asyncio.CancelledError:
                if not self._given_up:
                    raise
                return self._pause(self._given_up)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    self._pause(f"the coordinator refuses this agent: {error.details()}", loud=True)
                    return _REFUSED_S
                return self._pause(f"{error.code().name}: {error.details()}")

    async def _talk(self, call: Any) -> None:
        writing = asyncio.ensure_future(self._write(call))
        writing.add_done_callback(lambda _: self._written(call, writing))
        try:
            async for message in call:
                self._backoff = _BACKOFF_S[0]
                self._take(message)
        finally:
            # Not awaited: a cancellation of this task that came meanwhile would be lost in it.
            writing.cancel()
            call.cancel()

    def _written(self, call: Any, writing: asyncio.Task[None]) -> None:
        """Nobody awaits the writer: a stream that a bug has left without one would stay open, and say nothing."""
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            log.critical("a bug of Muster: what was to be said can't be: %r", error, exc_info=error)
            self._give_up(call, "a bug of Muster")

    def _give_up(self, call: Any, why: str) -> None:
        self._given_up = why
        call.cancel()

    def _pause(self, why: str, *, loud: bool = False) -> float:
        now = clock.monotonic()
        if loud or now - self._said > _SAY_S:
            log.warning("not attached to the coordinator at %s: %s", self._address, why)
            self._said = now
        wait = self._backoff * random.uniform(0.5, 1.5)
        self._backoff = min(2 * self._backoff, _BACKOFF_S[1])
        return wait

    async def _write(self, call: Any) -> None:
        self._sent.clear()
        started = clock.monotonic()
        pinged = float("-inf")
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await call.write(AgentMessage(hello=self._ears.hello))
            self._outbox.clear()
            self._ears.attached()
            self._due = started
            while True:
                await self._flush(call)
                now = clock.monotonic()
                if now - pinged >= self._period:
                    pinged = now
                    await call.write(self._ping(now))
                if self._sent and now - max(started, self.last_contact) > self._deaf_s:
                    self._give_up(call, f"no answer for {self._deaf_s:g} s")
                    return
                await self._sleep_until(min(pinged + self._period, self._due))

    async def _flush(self, call: Any) -> None:
        self._wake.clear()
        # The status first: an accusation is read in its light.
        if clock.monotonic() >= self._due:
            self._due = float("inf")
            await call.write(AgentMessage(status=self._ears.status()))
        while self._outbox:
            await call.write(self._outbox[0])
            self._outbox.popleft()

    async def _sleep_until(self, moment: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, moment - clock.monotonic())):
                await self._wake.wait()

    def _ping(self, now: float) -> AgentMessage:
        seq = next(self._seqs)
        self._sent[seq] = now
        return AgentMessage(ping=AgentPing(seq=seq))

    def _take(self, message: CoordinatorMessage) -> None:
        if message.term < self._term:
            log.warning("a message of term %d is ignored: this is term %d", message.term, self._term)
            return
        self._term = message.term
        match message.WhichOneof("body"):
            case "order":
                self._ears.order(message.order)
            case "probe":
                self._ears.probe(message.probe)
            case "pong":
                self._answered(message.pong.seq)
            case "dismissed":
                self._ears.dismissed(message.dismissed)
            case other:
                log.warning("the coordinator sends %s, which this version does not know", other)

    def _answered(self, seq: int) -> None:
        sent = self._sent.pop(seq, None)
        if sent is not None:
            self.last_contact = max(self.last_contact, sent)
            for older in [number for number in self._sent if number < seq]:
                del self._sent[older]
