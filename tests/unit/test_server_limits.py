"""What a server takes from its callers: nothing before it knows them, and from those that it knows no more than needed.

The callers here are plain gRPC clients without Muster's channel, so that they may send what no process of Muster sends.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from muster.daemon.agent.failure_detector.peers import AgentIdentity, refuse_other_users
from muster.daemon.transport.call_binding import CREDENTIAL_KEY, payload_of_call
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.credential_check import RefuseCaller
from muster.daemon.transport.identity import Proof, SecretCredentials, current_caller
from muster.daemon.transport.reachability import Probed, probe
from muster.daemon.transport.server_limits import (
    COORDINATOR,
    KIB,
    MIB,
    NODE_DAEMON,
    CallShare,
    ServerLimits,
    agent_limits,
)
from muster.v1.common_pb2 import PingRequest

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
LIMITS = NODE_DAEMON
PUBLIC_CALLS = CallShare("public", calls=2, user_calls=2, reading=2, all_reading=2)
ONE_CALL = replace(NODE_DAEMON.calls, calls=1)
UNREADABLE = b"\x0a\xff"
"""A field whose length is missing."""
WAIT_S = 60.0
"""Ends a wait that would never end."""
SIMULTANEOUS_CALLS = 3500
"""More than gRPC lets wait by default, for certain: 3,000."""


class Receiver:
    """Handlers for the four kinds of call, which count what reaches this process."""

    def __init__(self) -> None:
        self.messages = self.handled = 0
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    def handlers(self) -> dict[str, Any]:
        return {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self._unary, self._deserialize),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self._answers, self._deserialize),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self._stream, self._deserialize),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self._stream_answers, self._deserialize),
        }

    def _deserialize(self, message: bytes) -> bytes:
        self.messages += 1
        if message == UNREADABLE:
            PingRequest.FromString(message)
        return message

    async def _unary(self, request: bytes, context: Any) -> bytes:
        self.handled += 1
        self.entered.set()
        await self.go_on.wait()
        return str(current_caller().uid).encode()

    async def _answers(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.handled += 1
        yield b"answer"

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.handled += 1
        return str(len([message async for message in requests])).encode()

    async def _stream_answers(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.handled += 1
        async for message in requests:
            yield message


class Munge(SecretCredentials):
    """Counts the checks; with `hold`, each check waits until the test releases it."""

    checks = 0
    gate: "Gate | None" = None

    def check(self, token: str) -> Proof:
        self.checks += 1
        if self.gate is not None:
            self.gate.pass_through()
        return super().check(token)


class Gate:
    """Holds the threads that come to it."""

    def __init__(self) -> None:
        self._open, self._arrived = threading.Event(), threading.Semaphore(0)

    def pass_through(self) -> None:
        self._arrived.release()
        self._open.wait(WAIT_S)

    def wait_for_one(self) -> None:
        assert self._arrived.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def munge(tmp_path: Path) -> Munge:
    credentials = Munge.create(tmp_path / "secret")
    assert isinstance(credentials, Munge)
    return credentials


def refuse_nobody(method: str, uid: int) -> str:
    """The methods of the tests are in no table."""
    return ""


@asynccontextmanager
async def serving(
    munge: Munge, receiver: Receiver, limits: ServerLimits = LIMITS, refuse: RefuseCaller = refuse_nobody
) -> AsyncIterator[str]:
    """A server with `receiver` behind Muster's credential check. Yields its address."""
    server = make_server(
        munge, limits, refuse=refuse, share_of=lambda method, uid: PUBLIC_CALLS if uid is None else limits.calls
    )
    server.add_registered_method_handlers("test.Receiver", receiver.handlers())  # as generated code does
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        receiver.go_on.set()
        await server.stop(None)


def _credential(munge: Munge, kind: str, message: bytes = b"x") -> grpc.aio.Metadata:
    payload = payload_of_call(f"/test.Receiver/{kind}", "127.0.0.1", message)
    return grpc.aio.Metadata((CREDENTIAL_KEY, munge.issue(payload)))


async def _call(channel: grpc.aio.Channel, kind: str, message: bytes, metadata: Any = None, **options: Any) -> bytes:
    """One call with one message. The answer, or the last one of a stream."""
    called: Any = getattr(channel, kind)(f"/test.Receiver/{kind}")
    call = called(message if kind.startswith("unary") else iter([message]), metadata=metadata, **options)
    if kind.endswith("unary"):
        return bytes(await call)
    return b"".join([answer async for answer in call])


async def _refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(WAIT_S):
            await call
    return refused.value


def _channel(address: str) -> grpc.aio.Channel:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [10, 30_000_000])
async def test_an_anonymous_message_is_never_received(munge: Munge, kind: str, size: int) -> None:
    receiver = Receiver()
    async with serving(munge, receiver) as address, _channel(address) as channel:
        refused = await _refusal(_call(channel, kind, bytes(size)))
        # A stream's client that still writes when the call ends reports an error of its own.
        if kind.startswith("unary") or size < LIMITS.unread_bytes:
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            assert refused.details() == f"/test.Receiver/{kind} needs a credential (muster-credential)"
        assert (receiver.messages, receiver.handled, munge.checks) == (0, 0, 0)


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [None, "x.y.z"])
async def test_an_anonymous_caller_is_refused_although_its_message_never_comes(
    munge: Munge, kind: str, token: str | None
) -> None:
    """A client that streams sends the headers of a call only; the kind of call is the server's."""
    receiver = Receiver()
    metadata = grpc.aio.Metadata((CREDENTIAL_KEY, token)) if token else None
    async with serving(munge, receiver) as address, _channel(address) as channel:
        called: Any = channel.stream_unary(f"/test.Receiver/{kind}")
        refused = await _refusal(called(_nothing(), metadata=metadata))
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (receiver.messages, receiver.handled) == (0, 0)


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
async def test_a_refused_stream_that_goes_on_is_not_read(munge: Munge, kind: str) -> None:
    """gRPC lets a sender fill the window of its stream, and no more while nobody reads."""
    receiver, message, sent = Receiver(), bytes(KIB), 0
    async with serving(munge, receiver) as address, _channel(address) as channel:
        call: Any = getattr(channel, kind)(f"/test.Receiver/{kind}")()

        async def write_on() -> None:
            nonlocal sent
            async with asyncio.timeout(WAIT_S):
                while True:
                    await call.write(message)
                    sent += 1

        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await write_on()
    assert sent * len(message) <= 2 * LIMITS.unread_bytes
    assert (receiver.messages, receiver.handled) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_known_caller_is_served(munge: Munge, kind: str) -> None:
    receiver = Receiver()
    async with serving(munge, receiver) as address, _channel(address) as channel:
        assert await _call(channel, kind, b"x", _credential(munge, kind))
    assert (receiver.messages, receiver.handled) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_known_callers_message_that_is_too_large_is_refused_and_the_server_lives(
    munge: Munge, kind: str
) -> None:
    receiver = Receiver()
    async with serving(munge, receiver) as address, _channel(address) as channel:
        for _ in range(3):
            message = bytes(LIMITS.message_bytes + 1)
            refused = await _refusal(_call(channel, kind, message, _credential(munge, kind, message)))
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert receiver.messages == 0
        message = bytes(LIMITS.message_bytes)
        assert await _call(channel, kind, message, _credential(munge, kind, message))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_that_can_not_be_read_is_refused_and_not_logged(
    munge: Munge, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(munge, Receiver()) as address, _channel(address) as channel:
        refused = await _refusal(_call(channel, kind, UNREADABLE, _credential(munge, kind, UNREADABLE)))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await _call(channel, kind, b"x", _credential(munge, kind))
    # grpc.aio has one queue for all loops of a process: late events of an earlier test's closed loop come to this one.
    assert not [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()]


async def test_a_compressed_message_is_refused_unopened(munge: Munge) -> None:
    receiver = Receiver()
    async with serving(munge, receiver) as address, _channel(address) as channel:
        bomb = _call(
            channel, "unary_unary", bytes(32 * MIB), _credential(munge, "unary_unary"),
            compression=grpc.Compression.Gzip,
        )  # fmt: skip
        refused = await _refusal(bomb)
    assert refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert receiver.messages == 0


async def test_headers_that_are_too_large_are_refused(munge: Munge) -> None:
    receiver = Receiver()
    async with serving(munge, receiver) as address, _channel(address) as channel:
        metadata = grpc.aio.Metadata((CREDENTIAL_KEY, "x" * 9 * KIB))
        refused = await _refusal(_call(channel, "unary_unary", b"", metadata))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert munge.checks == 0


async def test_a_user_who_may_not_call_a_method_is_refused_before_the_message(munge: Munge) -> None:
    receiver = Receiver()

    def refuse(method: str, uid: int) -> str:
        return "" if method.endswith("unary_unary") else f"uid {uid} may not"

    async with serving(munge, receiver, refuse=refuse) as address, _channel(address) as channel:
        refused = await _refusal(_call(channel, "stream_unary", b"x", _credential(munge, "stream_unary")))
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert receiver.messages == 0
        assert await _call(channel, "unary_unary", b"x", _credential(munge, "unary_unary"))


@pytest.mark.parametrize(
    ("method", "uid", "refused"),
    [
        ("/muster.v1.PeerService/Offer", 1000, ""),
        ("/muster.v1.PeerService/Offer", 1001, "uid 1001 is not the owner of this gang"),
        ("/muster.v1.PeerService/Link", 0, "uid 0 is not the owner of this gang"),
        ("/muster.v1.ProbeService/Ping", 1001, ""),
    ],
)
def test_an_agent_takes_shards_from_the_gangs_owner_only(method: str, uid: int, refused: str) -> None:
    assert refuse_other_users(AgentIdentity("g", "n", "a", 1000), method, uid) == refused


async def test_credentials_beyond_the_limit_are_not_checked(munge: Munge) -> None:
    receiver, munge.gate = Receiver(), Gate()
    limits = replace(LIMITS, credential_checks=1)
    async with serving(munge, receiver, limits) as address, _channel(address) as channel:
        waiting = asyncio.ensure_future(_call(channel, "unary_unary", b"x", _credential(munge, "unary_unary")))
        await asyncio.to_thread(munge.gate.wait_for_one)
        refused = await _refusal(_call(channel, "unary_unary", b"x", _credential(munge, "unary_unary")))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "busy, try again" in str(refused.details())
        assert munge.checks == 1
        munge.gate.open()
        assert await waiting
        assert await _call(channel, "unary_unary", b"x", _credential(munge, "unary_unary"))


async def test_calls_beyond_the_limit_are_refused_until_one_ends(munge: Munge) -> None:
    receiver = Receiver()
    receiver.go_on.clear()
    limits = replace(LIMITS, calls=ONE_CALL)
    async with serving(munge, receiver, limits) as address, _channel(address) as channel:
        open_call = asyncio.ensure_future(_call(channel, "unary_unary", b"x", _credential(munge, "unary_unary")))
        await receiver.entered.wait()
        refused = await _refusal(_call(channel, "unary_unary", b"x", _credential(munge, "unary_unary")))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        receiver.go_on.set()
        await open_call
        async with asyncio.timeout(WAIT_S):
            assert await _until_served(channel, munge)


async def _until_served(channel: grpc.aio.Channel, munge: Munge) -> bytes:
    """The server gives a place back after it has answered."""
    while True:
        try:
            return await _call(channel, "unary_unary", b"x", _credential(munge, "unary_unary"))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise


async def test_a_known_callers_place_is_given_back_when_it_leaves_its_message_out(munge: Munge) -> None:
    """The call ends by the caller's cancellation, before any handler runs."""
    limits = replace(LIMITS, calls=ONE_CALL)
    async with serving(munge, Receiver(), limits) as address, _channel(address) as channel:
        called: Any = channel.stream_unary("/test.Receiver/unary_unary")
        call = called(_nothing(), metadata=_credential(munge, "unary_unary"))
        await call.wait_for_connection()
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            assert await _until_served(channel, munge)


async def test_a_busy_process_counts_as_alive(munge: Munge) -> None:
    """A probe meets a musterd that has no place left for a call."""
    async with serving(munge, Receiver(), replace(LIMITS, credential_checks=0)) as address:
        assert await probe(Probed(address, "n1", "127.0.0.1"), munge, WAIT_S) is None


async def test_anonymous_calls_of_public_methods_are_limited(munge: Munge) -> None:
    async with serving(munge, Receiver()) as address, _channel(address) as channel:
        called: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watching = [called(b"") for _ in range(PUBLIC_CALLS.calls)]
        for call in watching:
            assert await call.read()
        refused = await _refusal(called(b"").read())
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in watching:
            call.cancel()


@pytest.fixture
async def connections() -> AsyncIterator[list[asyncio.StreamWriter]]:
    opened: list[asyncio.StreamWriter] = []
    yield opened
    for writer in opened:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_connections_beyond_the_limit_are_closed(munge: Munge, connections: list[asyncio.StreamWriter]) -> None:
    limits = replace(LIMITS, connections=3, handshake_s=WAIT_S)
    async with serving(munge, Receiver(), limits) as address:
        readers = [await _connect(address, connections) for _ in range(4)]
        async with asyncio.timeout(WAIT_S):
            closed, _ = await asyncio.wait(
                [asyncio.ensure_future(_until_closed(reader)) for reader in readers],
                return_when=asyncio.FIRST_COMPLETED,
            )
        assert len(closed) == 1


async def test_a_connection_that_never_speaks_http2_is_closed(
    munge: Munge, connections: list[asyncio.StreamWriter]
) -> None:
    async with serving(munge, Receiver(), replace(LIMITS, handshake_s=0.05)) as address:
        reader = await _connect(address, connections)
        async with asyncio.timeout(WAIT_S):
            await _until_closed(reader)


async def test_a_connection_without_calls_is_closed(munge: Munge) -> None:
    async with serving(munge, Receiver(), replace(LIMITS, idle_s=0.05)) as address, _channel(address) as channel:
        await _call(channel, "unary_unary", b"x", _credential(munge, "unary_unary"))
        async with asyncio.timeout(WAIT_S):
            while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)


async def test_a_caller_whose_idle_connection_has_ended_calls_again(munge: Munge) -> None:
    """An agent that sends a report for a snapshot after a long step, for example."""
    receiver = Receiver()
    async with serving(munge, receiver, replace(LIMITS, idle_s=0.05)) as address, _channel(address) as channel:
        for _ in range(2):
            await _call(channel, "unary_unary", b"x", _credential(munge, "unary_unary"))
            async with asyncio.timeout(WAIT_S):
                while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
    assert receiver.handled == 2


async def test_a_stream_without_messages_is_not_idle(munge: Munge) -> None:
    async with serving(munge, Receiver(), replace(LIMITS, idle_s=0.05)) as address, _channel(address) as channel:
        stream: Any = channel.stream_stream("/test.Receiver/stream_stream")
        call = stream(metadata=_credential(munge, "stream_stream", b"1"))
        await call.write(b"1")
        assert await call.read() == b"1"
        async with _channel(address) as idle:  # by the end of this connection, the stream's could have ended as well
            await _call(idle, "unary_unary", b"x", _credential(munge, "unary_unary"))
            async with asyncio.timeout(WAIT_S):
                while (state := idle.get_state()) is grpc.ChannelConnectivity.READY:
                    await idle.wait_for_state_change(state)
        await call.write(b"2")
        assert await call.read() == b"2"
        call.cancel()


async def _connect(address: str, connections: list[asyncio.StreamWriter]) -> asyncio.StreamReader:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connections.append(writer)
    return reader


async def _until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(KIB):
            pass
    except ConnectionError:
        pass


def test_an_agents_limits_grow_with_its_gang() -> None:
    small, large = agent_limits(2), agent_limits(12_500)
    assert large.connections > 12_500
    assert large.calls.calls > 12_500
    assert small.connections < 200
    assert [agent_limits(members).idle_s for members in (2, 166, 1000, 12_500)] == [10.0, 10.0, 60.0, 600.0]


class Watched(Receiver):
    """Its unary call waits, as the watch of an idle job does, and notes its end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self.go_on.clear()

    async def _unary(self, request: bytes, context: Any) -> bytes:
        try:
            return await super()._unary(request, context)
        finally:
            self.ended.set()


class Link:
    """A TCP relay on loopback. After `cut`, it forwards no byte, and both its connections stay open."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Listen. Returns the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.cut()
        for writer in self._writers:
            writer.transport.abort()
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, sink)))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)


async def test_a_watcher_whose_host_has_vanished_is_noticed(munge: Munge) -> None:
    """A host without power sends no FIN, so the server's kernel keeps its connection. Nothing else ends its calls."""
    receiver = Watched()
    async with serving(munge, receiver, replace(COORDINATOR, ping_s=0.2)) as address:
        link = Link(address)
        async with _channel(await link.open()) as channel, asyncio.timeout(WAIT_S):
            waiting = asyncio.ensure_future(_call(channel, "unary_unary", b"x", _credential(munge, "unary_unary")))
            await receiver.entered.wait()
            link.cut()
            await receiver.ended.wait()
            await link.close()
            await asyncio.gather(waiting, return_exceptions=True)


def test_the_coordinator_pings_its_clients() -> None:
    assert COORDINATOR.ping_s == 30.0


@pytest.mark.parametrize("waiting", [COORDINATOR.waiting_calls, 100])
async def test_all_of_thousands_of_simultaneous_calls_are_answered_where_so_many_may_wait(
    munge: Munge, waiting: int
) -> None:
    """A coordinator that restarts is called by all nodes at once. gRPC drops what is above its own limit, 1000."""
    limits = replace(LIMITS, waiting_calls=waiting, calls_per_connection=SIMULTANEOUS_CALLS)
    async with serving(munge, Receiver(), limits) as address, _channel(address) as channel:
        method = channel.unary_unary("/test.Receiver/unary_unary")
        calls = [method(b"") for _ in range(SIMULTANEOUS_CALLS)]
        async with asyncio.timeout(WAIT_S):
            codes = await asyncio.gather(*(call.code() for call in calls))
    answered = codes.count(grpc.StatusCode.UNAUTHENTICATED)
    assert (answered == SIMULTANEOUS_CALLS) == (waiting >= SIMULTANEOUS_CALLS)
