"""The agent's stream to the coordinator: hello, then complete statuses up, orders, probes and measurements down.
It is reopened whenever it ends.

Training never waits for the stream. Without a coordinator the ranks continue; the agent reports the changes when it
attaches again.
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
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.transport.channel import (
    RECONNECT_TIMEOUT_S,
    credential_metadata,
    open_first_ready_channel,
    raise_if_cancelled,
)
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.server_limits import ORDER_BYTES
from muster.daemon.transport.site_config import split_addresses
from muster.daemon.transport.tls import Trust, explain
from muster.v1.agent_pb2 import (
    AgentHello,
    AgentMessage,
    AgentPing,
    AgentStatus,
    Certificate,
    CoordinatorMessage,
    MeasureOrder,
    Order,
    ProbeOrder,
)
from muster.v1.agent_pb2_grpc import AgentServiceStub
from muster.v1.common_pb2 import Release

log = logging.getLogger(__name__)

# Seconds between pings to the coordinator while this agent suspects nobody. During a suspicion: SUSPICION_PING_S.
_IDLE_PING_S = 5.0
# Seconds without an answer after which the agent dials again: three idle pings. With a standby the agent dials sooner,
# because the other coordinator may have taken over.
_ANSWER_TIMEOUT_S, _ANSWER_TIMEOUT_WITH_STANDBY_S = 16.0, 7.0
_HELLO_TIMEOUT_S = 60.0
"""A coordinator reads the first messages of many agents in turn."""
_BACKOFF_S = (0.05, 1.0)
_REFUSED_RETRY_S = 5.0
_ATTACH = "/muster.v1.AgentService/Attach"
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


@dataclass(frozen=True, slots=True)
class StreamHandlers:
    """What the stream calls.

    hello: returns the first message of a stream.
    status: returns the agent's whole status.
    met: the coordinator's first message of a stream has come, with what it says of its version.
    attached: a new stream is open. Its coordinator may not know what was sent before.
    certificate_due: a new certificate is due, so the stream is to be reopened.
    certificate, order, probe, measure, dismissed: a message of this kind has arrived.
    """

    hello: Callable[[], AgentHello]
    status: Callable[[], AgentStatus]
    met: Callable[[Release], None]
    attached: Callable[[], None]
    certificate_due: Callable[[], bool]
    certificate: Callable[[Certificate], None]
    order: Callable[[Order], None]
    probe: Callable[[ProbeOrder], object]
    measure: Callable[[MeasureOrder], object]
    dismissed: Callable[[str], None]


class CoordinatorStream:
    """The agent's side of AgentService.Attach. Before `run`, nothing is sent, and what is to be sent is forgotten: the
    first status says it.

    last_contact: monotonic seconds at which the newest answered ping was sent; minus infinity: no ping was answered.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        trust: Trust | None = None,
        answer_timeout_s: float | None = None,
    ) -> None:
        """`trust`: whom to take for a coordinator; None: plain text. `answer_timeout_s`: seconds without an answer, or
        without a read, after which the stream ends; None: as many as the number of coordinators asks for."""
        self.last_contact = float("-inf")
        self._address = address
        self._answer_timeout_s = answer_timeout_s or (
            _ANSWER_TIMEOUT_WITH_STANDBY_S if len(split_addresses(address)) > 1 else _ANSWER_TIMEOUT_S
        )
        self._credentials = credentials
        self._trust = trust
        self._handlers: StreamHandlers  # from `run` on
        self._outbox: deque[AgentMessage] = deque()
        # When to send the status; infinity: the status has not changed.
        self._status_due = float("-inf")
        self._wake = asyncio.Event()
        self._seqs = itertools.count(1)
        self._pings_sent: dict[int, float] = {}
        self._period = _IDLE_PING_S
        self._term = 0
        self._backoff = _BACKOFF_S[0]
        self._detached = LastingProblem(log, f"attached to the coordinator at {address} again")
        self._met = False
        # Why this side has closed the stream; empty: it has not.
        self._closed_because = ""

    def schedule_status(self, within: float = 0.0) -> None:
        """The status has changed: send it within `within` seconds, once for all changes until then."""
        due = clock.monotonic() + within
        if due < self._status_due:
            self._status_due = due
            self._wake.set()

    def send(self, message: AgentMessage) -> None:
        """Send a message that is not part of a status. The message is lost if no stream is open."""
        self._outbox.append(message)
        self._wake.set()

    def set_suspicion(self, suspicion: bool) -> None:
        """Ping more often during a `suspicion`, so that self-fencing has fresh answers."""
        self._period = silence_rules.SUSPICION_PING_S if suspicion else _IDLE_PING_S
        self._wake.set()

    async def run(self, handlers: StreamHandlers) -> None:
        """Stay attached: reopen the stream whenever it ends."""
        self._handlers = handlers
        while True:
            wait = await self._run_stream()
            raise_if_cancelled()
            await asyncio.sleep(wait)

    async def _run_stream(self) -> float:
        """Run one stream from its opening to its end; return the seconds to wait before the next."""
        addresses = split_addresses(self._address)
        async with await open_first_ready_channel(
            addresses,
            self._credentials,
            trust=self._trust,
            receive_bytes=ORDER_BYTES,
            deadline_s=RECONNECT_TIMEOUT_S,
        ) as channel:
            self._closed_because = ""
            try:
                hello = AgentMessage(hello=self._handlers.hello())
                metadata = await credential_metadata(channel, _ATTACH, hello)
                await self._exchange(AgentServiceStub(channel).Attach(metadata=metadata), hello)  # type: ignore[call-arg]
                return self._log_and_back_off("the coordinator has ended the stream")
            except asyncio.CancelledError:
                if not self._closed_because:
                    raise
                return self._log_and_back_off(self._closed_because)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    self._log_and_back_off(f"the coordinator refuses this agent: {error.details()}")
                    return _REFUSED_RETRY_S
                return self._log_and_back_off(f"{error.code().name}: {explain(error.details() or '', self._trust)}")

    async def _exchange(self, call: Any, hello: AgentMessage) -> None:
        self._met = False
        writing = asyncio.ensure_future(self._write(call, hello))
        writing.add_done_callback(lambda _: self._on_writer_done(call, writing))
        try:
            async for message in call:
                self._backoff = _BACKOFF_S[0]
                self._detached.end()
                self._handle(message)
        finally:
            # Do not await the writer: a cancellation of this task that arrives during the await would be lost.
            writing.cancel()
            call.cancel()

    def _on_writer_done(self, call: Any, writing: asyncio.Task[None]) -> None:
        """Nobody awaits the writer. If a bug ends the writer, close the stream: it would otherwise stay open and send
        nothing."""
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            log.critical("a bug of Muster: the messages to the coordinator can't be sent: %r", error, exc_info=error)
            self._close(call, "a bug of Muster")

    def _close(self, call: Any, why: str) -> None:
        self._closed_because = why
        call.cancel()

    def _log_and_back_off(self, why: str) -> float:
        self._detached.meet(f"not attached to the coordinator at {self._address}: {why}")
        wait = self._backoff * random.uniform(0.5, 1.5)
        self._backoff = min(2 * self._backoff, _BACKOFF_S[1])
        return wait

    async def _write(self, call: Any, hello: AgentMessage) -> None:
        self._pings_sent.clear()
        started = clock.monotonic()
        pinged = float("-inf")
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError, TimeoutError):
            await self._send(call, hello, _HELLO_TIMEOUT_S)
            self._outbox.clear()
            self._handlers.attached()
            self._status_due = started
            while True:
                await self._flush(call)
                now = clock.monotonic()
                if now - pinged >= self._period:
                    pinged = now
                    await self._send(call, self._ping(now), self._answer_timeout_s)
                if self._pings_sent and now - max(started, self.last_contact) > self._answer_timeout_s:
                    self._close(call, f"no answer for {self._answer_timeout_s:g} s")
                    return
                if self._handlers.certificate_due():
                    self._close(call, "a new certificate is due")
                    return
                await self._sleep_until(min(pinged + self._period, self._status_due))

    async def _flush(self, call: Any) -> None:
        self._wake.clear()
        # Send the status first: the coordinator judges an accusation by the newest status.
        if clock.monotonic() >= self._status_due:
            self._status_due = float("inf")
            await self._send(call, AgentMessage(status=self._handlers.status()), self._answer_timeout_s)
        while self._outbox:
            await self._send(call, self._outbox[0], self._answer_timeout_s)
            self._outbox.popleft()

    async def _send(self, call: Any, message: AgentMessage, timeout_s: float) -> None:
        """Send a message. A coordinator that is suspended reads nothing: a write waits for it once its window is full.

        Raises:
            TimeoutError: nobody has read for so many seconds; the stream is closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(message)
        except TimeoutError:
            self._close(call, f"no message was read for {timeout_s:g} s")
            raise

    async def _sleep_until(self, moment: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, moment - clock.monotonic())):
                await self._wake.wait()

    def _ping(self, now: float) -> AgentMessage:
        seq = next(self._seqs)
        self._pings_sent[seq] = now
        return AgentMessage(ping=AgentPing(seq=seq))

    def _handle(self, message: CoordinatorMessage) -> None:
        if message.term < self._term:
            log.warning("ignored a message of term %d: the newest term is %d", message.term, self._term)
            return
        self._term = message.term
        if not self._met and not message.HasField("certificate"):
            self._met = True
            self._handlers.met(message.release)
        match message.WhichOneof("body"):
            case "certificate":
                self._handlers.certificate(message.certificate)
            case "order":
                self._handlers.order(message.order)
            case "probe":
                self._handlers.probe(message.probe)
            case "measure":
                self._handlers.measure(message.measure)
            case "pong":
                self._on_pong(message.pong.seq)
            case "dismissed":
                self._handlers.dismissed(message.dismissed)
            case other:
                log.warning("the coordinator sent %s, which this version does not know", other)

    def _on_pong(self, seq: int) -> None:
        sent = self._pings_sent.pop(seq, None)
        if sent is not None:
            self.last_contact = max(self.last_contact, sent)
            for older in [number for number in self._pings_sent if number < seq]:
                del self._pings_sent[older]
