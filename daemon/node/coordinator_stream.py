"""The node's stream to the coordinator: hello, then heartbeats and signals, each answered in turn.

A heartbeat waits until the one before it is answered. A coordinator with too much to do gets fewer heartbeats for that
reason, and a signal waits behind one of them at most.

When the stream ends or falls silent, it is reopened after a pause of 100 ms that doubles up to 2 s. The coordinator of
a large site asks for longer pauses: thousands of nodes that return at the same moment would all wait for each other,
give up, and begin again. Signals wait in the outbox until they are answered. A node that has a signal to report does
not make the longer pause. An answer with a lower term than an earlier one comes from a replaced coordinator: the stream
is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from muster import compatibility
from muster.daemon.host import clock
from muster.daemon.host.addresses import own_addresses
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.node.clock_offset import ClockOffset
from muster.daemon.node.outbox import Outbox
from muster.daemon.node.own_verdict import OwnVerdict
from muster.daemon.node.requested_check import RequestedCheck
from muster.daemon.node.sensors.sensor import Observation
from muster.daemon.node.stream_pauses import DEFAULT_TIMEOUTS, ReturnPause, StreamTimeouts
from muster.daemon.transport.channel import (
    RECONNECT_TIMEOUT_S,
    credential_metadata,
    open_first_ready_channel,
    raise_if_cancelled,
)
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import split_addresses
from muster.daemon.transport.tls import ServerKey, Trust, explain
from muster.v1 import node_pb2 as pb
from muster.v1 import node_pb2_grpc
from muster.v1.common_pb2 import Hardware

_log = logging.getLogger(__name__)


class KeptGangs(Protocol):
    """What this node keeps of requeued jobs (kept_memory_store.KeptMemoryStore)."""

    def kept(self) -> list[tuple[str, int]]: ...
    def mark_obsolete(self, gang: str, generation: int) -> None: ...


class StreamLost(Exception):
    """The stream is unusable; the message says why."""


@dataclass(slots=True)
class _StreamState:
    """One stream: what was sent and not answered yet (None: not a signal), when the newest heartbeat was sent
    (monotonic seconds), whether a heartbeat waits for that, whether hello was answered, whether it closed."""

    unanswered: deque[Observation | None] = field(default_factory=deque)
    heartbeat_sent_at: float = 0.0
    heartbeat_waits: bool = False
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False


class NodeStream:
    """Keeps one node attached. `hello` is called at each attach, because addresses may change; it may raise OSError.

    `addresses` returns the IP addresses of this node, as `hello` names them. When they change, the stream is reopened,
    so that the coordinator knows them: it compares an agent's address with them.

    `trust`: whom to take for a coordinator; None: plain text. `key`: of this daemon's server. It gets each certificate
    that the coordinator sends. The stream is reopened when a new one is due.

    `on_rules` gets the rules of signals that the coordinator sends in its answer to hello. `own_verdict` gets all
    observations and answers. `clock_offset` gets the coordinator's time. `requested_check` gets the name of the check
    that each order asks for. `hardware` returns what the node has. The coordinator gets the whole again when it has
    changed. `driver_lines` returns what drivers have said that was not understood.
    """

    def __init__(
        self,
        coordinator: str,
        credentials: Credentials,
        hello: Callable[[], Awaitable[pb.NodeHello]],
        heartbeat_s: float,
        memory: KeptGangs,
        timeouts: StreamTimeouts = DEFAULT_TIMEOUTS,
        addresses: Callable[[], tuple[str, ...]] = own_addresses,
        trust: Trust | None = None,
        key: ServerKey | None = None,
        on_rules: Callable[[Iterable[pb.SignalRule]], None] = lambda _: None,
        own_verdict: OwnVerdict | None = None,
        clock_offset: ClockOffset | None = None,
        requested_check: RequestedCheck | None = None,
        hardware: Callable[[], Hardware] = Hardware,
        driver_lines: Callable[[], pb.DriverLines] = pb.DriverLines,
    ) -> None:
        self._hardware = hardware
        self._driver_lines = driver_lines
        self._requested_check = requested_check or RequestedCheck("")
        self._own_verdict = own_verdict or OwnVerdict()
        self._clock_offset = clock_offset or ClockOffset()
        self._on_rules = on_rules
        self._coordinator = coordinator
        self._credentials = credentials
        self._hello = hello
        self._heartbeat_s = heartbeat_s
        self._memory = memory
        self._timeouts = timeouts
        self._addresses = addresses
        self._trust = trust
        self._key = key
        self._outbox = Outbox()
        self._seq = 0
        self._term = 0
        self._return_pause = ReturnPause(timeouts)
        self.answered_at = 0.0
        """When the coordinator last answered (monotonic seconds); 0: never."""
        self._detached = LastingProblem(_log, f"attached to {coordinator} again")

    def report(self, observation: Observation) -> None:
        """Send an observation now, or as soon as the coordinator answers."""
        self._own_verdict.observe(observation)
        self._outbox.put(observation)

    @property
    def waiting(self) -> int:
        """Observations that the coordinator has not confirmed."""
        return len(self._outbox)

    def hardware_changed(self) -> None:
        """Look again at what the node has."""
        self._outbox.changed.set()

    async def run(self) -> None:
        """Stay attached until cancelled."""
        waits, loop = self._timeouts.backoffs(), asyncio.get_running_loop()
        while True:
            self._return_pause.begin_attempt(loop.time())
            try:
                hello = await self._hello()
                async with await open_first_ready_channel(
                    split_addresses(self._coordinator),
                    self._credentials,
                    trust=self._trust,
                    deadline_s=RECONNECT_TIMEOUT_S,
                ) as channel:
                    async for _ in self._stream(channel, hello):
                        waits = self._timeouts.backoffs()
            except (StreamLost, grpc.aio.AioRpcError, OSError) as error:
                raise_if_cancelled()
                self._detached.meet(f"not attached to {self._coordinator}, trying again: {self._describe(error)}")
                self._return_pause.stream_ended(loop.time())
                await self._pause(next(waits))

    def _describe(self, error: Exception) -> str:
        if isinstance(error, grpc.aio.AioRpcError):
            return f"{error.code().name}: {explain(error.details() or '', self._trust)}"
        return str(error)

    async def _pause(self, backoff_s: float) -> None:
        """Wait before the next attempt: `backoff_s`, and the coordinator's wish if there is no signal to report."""
        now = asyncio.get_running_loop().time()
        self._outbox.changed.clear()
        await asyncio.sleep(backoff_s)
        if not len(self._outbox):
            await _wait_until(self._outbox.changed, now + self._return_pause.choose())

    async def _stream(self, channel: grpc.aio.Channel, hello: pb.NodeHello) -> AsyncIterator[pb.NodeOrder]:
        """Run one stream: yield each answer after it is accepted.

        Raises:
            StreamLost, grpc.aio.AioRpcError, OSError: the stream ended.
        """
        self._outbox.rewind()
        state = _StreamState()
        first_message = pb.NodeMessage(hello=hello)
        metadata = await credential_metadata(channel, "/muster.v1.NodeService/Attach", first_message)
        messages = self._messages(first_message, tuple(hello.addresses), state)
        call = node_pb2_grpc.NodeServiceStub(channel).Attach(messages, metadata=metadata)
        try:
            allowed, first = self._timeouts.hello_timeout_s, True
            while True:
                order = await _read_order(call, allowed)
                if first:
                    _check_version(hello, order)
                self._accept(order, state)
                if first:
                    first = False
                    self._detached.end()
                    _log.info(
                        "attached to %s, term %d, heartbeat %g s", self._coordinator, order.term, self._heartbeat_s
                    )
                allowed = self._heartbeat_s + self._timeouts.answer_timeout_s
                yield order
        finally:
            # gRPC abandons the generator of messages: let the generator end, and take nothing more from the outbox.
            state.over = True
            state.welcomed.set()
            self._outbox.changed.set()
            call.cancel()

    async def _messages(
        self, hello: pb.NodeMessage, addresses: tuple[str, ...], state: _StreamState
    ) -> AsyncIterator[pb.NodeMessage]:
        """Yield what is sent: hello, then heartbeats at their times and signals as they come."""
        loop = asyncio.get_running_loop()
        state.unanswered.append(None)
        told, told_lines = hello.hello.hardware, pb.DriverLines()
        yield hello
        await state.welcomed.wait()  # gRPC shows a refusal only to a caller that is not writing
        next_heartbeat_at = loop.time()
        while not state.over:
            if observation := self._outbox.next_unsent():
                state.unanswered.append(observation)
                yield pb.NodeMessage(signal=observation.message())
            elif (hardware := self._hardware()) != told:
                told = hardware
                state.unanswered.append(None)
                yield pb.NodeMessage(hardware=hardware)
            elif addresses != self._addresses():
                _log.info("the IP addresses of this node have changed: attaching again with the new ones")
                return
            elif self._key and self._key.renewal_due:
                _log.info("a new certificate is due: attaching again")
                return
            elif loop.time() >= next_heartbeat_at and None in state.unanswered:
                state.heartbeat_waits = True
                await self._outbox.changed.wait()
            elif loop.time() >= next_heartbeat_at:
                next_heartbeat_at = loop.time() + self._heartbeat_s
                self._seq += 1
                state.unanswered.append(None)
                state.heartbeat_sent_at = clock.monotonic()
                kept = [pb.KeptGang(gang_id=gang, generation=newest) for gang, newest in self._memory.kept()]
                heartbeat = pb.Heartbeat(seq=self._seq, kept=kept, checked=self._requested_check.message())
                if (lines := self._driver_lines()) != told_lines:
                    told_lines = lines
                    heartbeat.driver_lines.CopyFrom(lines)
                yield pb.NodeMessage(heartbeat=heartbeat)
            else:
                next_heartbeat_at = min(
                    next_heartbeat_at, loop.time() + self._heartbeat_s
                )  # the coordinator may have asked for a shorter interval
                await _wait_until(self._outbox.changed, next_heartbeat_at)

    def _accept(self, order: pb.NodeOrder, state: _StreamState) -> None:
        """Process an answer. Answers have the order of the messages."""
        if order.term < self._term:
            raise StreamLost(
                f"it answers with term {order.term}, but term {self._term} was seen: an older coordinator is still"
                " running (if its journal was begun anew, restart musterd)"
            )
        self._term = order.term
        self.answered_at = clock.monotonic()
        if order.certificate and self._key:
            self._key.use(order.certificate)
        if order.rules or not state.welcomed.is_set():  # an older coordinator has none, and says so with hello's answer
            self._on_rules(order.rules)
        to_hello = not state.welcomed.is_set()
        state.welcomed.set()
        observation = state.unanswered.popleft() if state.unanswered else None
        if observation:
            self._outbox.confirm(observation)
        self._own_verdict.take_answer(order, observation, to_hello)
        if order.now_s and order.seq and order.seq == self._seq:
            self._clock_offset.note(state.heartbeat_sent_at, order.now_s)
        self._requested_check.ask(order.check)
        for gang in order.over:
            self._memory.mark_obsolete(gang.gang_id, gang.generation)
        if state.heartbeat_waits:
            state.heartbeat_waits = False
            self._outbox.changed.set()
        self._return_pause.answered(order.return_within_s)
        if order.heartbeat_s > 0 and order.heartbeat_s != self._heartbeat_s:
            self._heartbeat_s = order.heartbeat_s
            self._outbox.changed.set()


def _check_version(hello: pb.NodeHello, order: pb.NodeOrder) -> None:
    """Raises StreamLost: the coordinator's version does not fit. An older coordinator does not compare."""
    mine = compatibility.read(f"musterd on {hello.node}", hello.release)
    if reason := compatibility.misfit(mine, compatibility.read("the coordinator", order.release)):
        raise StreamLost(reason)


async def _read_order(call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.NodeOrder], allowed: float) -> pb.NodeOrder:
    try:
        async with asyncio.timeout(allowed):
            order = await call.read()
    except TimeoutError:
        raise StreamLost(f"no answer for {allowed:g} s") from None
    if not isinstance(order, pb.NodeOrder):
        raise StreamLost("it closed the stream")
    return order


async def _wait_until(event: asyncio.Event, moment: float) -> None:
    """Wait for the event, at most until `moment` on the loop's clock."""
    try:
        async with asyncio.timeout_at(moment):
            await event.wait()
    except TimeoutError:
        pass
