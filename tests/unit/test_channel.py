"""Channels and servers: who is let in, for each of gRPC's four kinds of call."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from muster.daemon.transport.call_binding import payload_of_call
from muster.daemon.transport.channel import (
    ListenError,
    bind,
    check_listen_address,
    credential_metadata,
    make_server,
    open_channel,
    open_first_ready_channel,
    raise_unexpected_error,
    stop_server,
)
from muster.daemon.transport.credential_check import CREDENTIAL_KEY, address_of
from muster.daemon.transport.identity import Credentials, IdentityUnavailable, Proof, SecretCredentials, current_caller
from muster.daemon.transport.server_limits import COORDINATOR, MIB
from muster.v1 import common_pb2_grpc, peer_pb2, peer_pb2_grpc
from muster.v1.common_pb2 import PingReply, PingRequest

KINDS = ("Offer", "Fetch", "Link")
LINK = "/muster.v1.PeerService/Link"
FIRST_PING = peer_pb2.LinkPing(seq=4)
FIRST_MESSAGES = {
    "Offer": peer_pb2.ShardOffer(),
    "Fetch": peer_pb2.FetchRequest(),
    "Link": FIRST_PING,
}


def _caller() -> str:
    caller = current_caller()
    return f"{caller.uid}@{caller.address}"


class Peer(peer_pb2_grpc.PeerServiceServicer):
    """All kinds of call; each answers with who called."""

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardStored:
        return peer_pb2.ShardStored(refused=_caller())

    async def Fetch(self, request: peer_pb2.FetchRequest, context: Any) -> AsyncIterator[peer_pb2.ShardOffer]:
        for _ in range(3):
            yield peer_pb2.ShardOffer(node=_caller())

    async def Link(  # type: ignore[override]
        self, request_iterator: AsyncIterator[peer_pb2.LinkPing], context: Any
    ) -> None:
        """Writes its stream itself, as a coroutine may."""
        assert _caller()
        async for ping in request_iterator:
            await context.write(peer_pb2.LinkPong(seq=ping.seq))

    async def Stored(self, request: peer_pb2.StoredReport, context: Any) -> peer_pb2.PeerAck:
        return peer_pb2.PeerAck()

    async def Committed(self, request: peer_pb2.CommitNotice, context: Any) -> peer_pb2.PeerAck:
        return peer_pb2.PeerAck()


class Probe(common_pb2_grpc.ProbeServiceServicer):
    async def Ping(self, request: PingRequest, context: Any) -> PingReply:
        return PingReply(nonce=request.nonce)


class Served:
    """A server with all of the above on a port of its own."""

    def __init__(self, credentials: Credentials, deadline_s: float = 5.0) -> None:
        self._server = make_server(credentials, COORDINATOR, identity_deadline_s=deadline_s)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(Peer(), self._server)
        common_pb2_grpc.add_ProbeServiceServicer_to_server(Probe(), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self._server)  # type: ignore[attr-defined]
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"

    async def __aenter__(self) -> "Served":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return SecretCredentials.create(tmp_path / "secret")


@pytest.fixture
async def served(credentials: SecretCredentials) -> AsyncIterator[Served]:
    async with Served(credentials) as served:
        yield served


async def _call(channel: grpc.aio.Channel, kind: str, metadata: Any = None) -> list[Any]:
    """All answers of one call of that kind."""
    stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
    if kind == "Offer":
        return [(await stub.Offer(peer_pb2.ShardOffer(), metadata=metadata)).refused]
    if kind == "Fetch":
        return [answer.node async for answer in stub.Fetch(peer_pb2.FetchRequest(), metadata=metadata)]
    pings = iter([FIRST_PING, peer_pb2.LinkPing(seq=5)])
    return [answer.seq async for answer in stub.Link(pings, metadata=metadata)]


async def _refusal(channel: grpc.aio.Channel, kind: str, metadata: Any = None) -> grpc.aio.AioRpcError:
    """How a call of that kind is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _send_first_message(channel, kind, metadata)
    return refused.value


async def _send_first_message(channel: grpc.aio.Channel, kind: str, metadata: Any) -> None:
    """Wait for the answer to the first message of a call. The call sends no second message, and no end: grpc.aio says
    INTERNAL, in place of the status, if a write of its own finds the call ended."""
    if kind in {"Offer", "Fetch"}:
        await _call(channel, kind, metadata)
        return
    stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
    call = getattr(stub, kind)(metadata=metadata)
    await call.write(FIRST_MESSAGES[kind])
    await call.read()


async def _proved(channel: grpc.aio.Channel, kind: str) -> list[Any]:
    """As `_call`, with a credential: a call that streams both ways is opened with one, others get it on their way."""
    return await _call(channel, kind, await credential_metadata(channel, LINK, FIRST_PING) if kind == "Link" else None)


async def test_of_several_servers_the_one_that_answers_is_reached(
    served: Served, credentials: SecretCredentials
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as gone:
        gone_address = f"127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        mute_address = f"127.0.0.1:{mute.getsockname()[1]}"  # its kernel takes connections, and nobody is there
        async with await open_first_ready_channel([mute_address, gone_address, served.address], credentials) as channel:
            assert await _call(channel, "Offer")


async def test_where_none_answers_the_call_says_so(credentials: SecretCredentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (one, other)]
    async with await open_first_ready_channel(addresses, credentials, deadline_s=0.2) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(channel, "Offer")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_each_kind_of_call_knows_its_caller(
    served: Served, credentials: SecretCredentials, tmp_path: Path
) -> None:
    me = f"{(tmp_path / 'secret').stat().st_uid}@127.0.0.1"
    async with open_channel(served.address, credentials) as channel:
        assert await _proved(channel, "Offer") == [me]
        assert await _proved(channel, "Fetch") == [me] * 3
        assert await _proved(channel, "Link") == [4, 5]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_credential_is_refused(served: Served, kind: str) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        refused = await _refusal(channel, kind)
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused.details() == f"/muster.v1.PeerService/{kind} needs a credential (muster-credential)"


def _token(credentials: Credentials, kind: str, server: str = "127.0.0.1", message: Any = None) -> Any:
    """Metadata with a credential that is made by hand."""
    first = FIRST_MESSAGES[kind] if message is None else message
    payload = payload_of_call(f"/muster.v1.PeerService/{kind}", server, first.SerializeToString())
    return ((CREDENTIAL_KEY, credentials.issue(payload)),)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replayed_credential_is_refused(served: Served, credentials: SecretCredentials, kind: str) -> None:
    token = _token(credentials, kind)
    async with grpc.aio.insecure_channel(served.address) as channel:
        await _call(channel, kind, token)
        refused = await _refusal(channel, kind, token)
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused.details() == "the credential is refused: it has been used before"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_credential_for_another_method_is_refused(
    served: Served, credentials: SecretCredentials, kind: str
) -> None:
    token = _token(credentials, "Fetch" if kind == "Offer" else "Offer")
    async with grpc.aio.insecure_channel(served.address) as channel:
        refused = await _refusal(channel, kind, token)
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", KINDS)
async def test_a_credential_for_another_server_is_refused(
    served: Served, credentials: SecretCredentials, kind: str
) -> None:
    """A standby, for example, to whom somebody shows what the first coordinator was shown."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        refused = await _refusal(channel, kind, _token(credentials, kind, server="mgmt2"))
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    words = "the credential is refused: it was made for the server 'mgmt2', and this server has another name"
    assert refused.details() == words


@pytest.mark.parametrize("kind", KINDS)
async def test_a_credential_for_another_message_is_refused(
    served: Served, credentials: SecretCredentials, kind: str
) -> None:
    other = type(FIRST_MESSAGES[kind])()
    other.ParseFromString(b"\xfa\x01\x01x")  # a field that nobody knows
    async with grpc.aio.insecure_channel(served.address) as channel:
        refused = await _refusal(channel, kind, _token(credentials, kind, message=other))
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused.details() == "the credential is refused: it was made for another message than this one"


async def test_health_is_told_to_anyone(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stream_goes_both_ways_at_once(served: Served, credentials: SecretCredentials) -> None:
    async with open_channel(served.address, credentials) as channel:
        stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
        call = stub.Link(metadata=await credential_metadata(channel, LINK, FIRST_PING))
        for seq in (4, 5, 6):
            await call.write(peer_pb2.LinkPing(seq=seq))
            assert (await call.read()).seq == seq
        await call.done_writing()
        assert not isinstance(await call.read(), peer_pb2.LinkPong)


async def test_a_client_receives_messages_up_to_its_own_size(served: Served, credentials: SecretCredentials) -> None:
    nonce = "x" * MIB
    async with open_channel(served.address, credentials, receive_bytes=2 * MIB) as channel:
        stub = common_pb2_grpc.ProbeServiceStub(channel)
        assert (await stub.Ping(PingRequest(nonce=nonce))).nonce == nonce
    async with open_channel(served.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
            await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(nonce=nonce))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Absent:
    """A host without munge."""

    def issue(self, payload: str) -> str:
        raise IdentityUnavailable("no munged here")

    def check(self, token: str) -> Proof:
        raise IdentityUnavailable("no munged here")


@pytest.mark.parametrize("kind", KINDS)
async def test_without_munge_at_the_caller_a_call_is_unavailable(served: Served, kind: str) -> None:
    async with open_channel(served.address, Absent()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _proved(channel, kind)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, "no munged here")
    assert isinstance(refused.value.__cause__, IdentityUnavailable)


async def test_without_munge_at_the_server_a_call_is_unavailable(credentials: SecretCredentials) -> None:
    async with Served(Absent()) as served, open_channel(served.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _call(channel, "Offer")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, "no munged here")


class Stuck:
    """A munged that accepts and never answers, until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def issue(self, payload: str) -> str:
        self.let_go.wait(60)
        return "late"

    def check(self, token: str) -> Proof:
        self.let_go.wait(60)
        return Proof(0, 0, "")


async def test_a_stuck_munge_at_the_caller_holds_up_nothing_else(
    served: Served, credentials: SecretCredentials
) -> None:
    stuck = Stuck()
    async with open_channel(served.address, stuck, identity_deadline_s=0.2) as dull:
        call = asyncio.ensure_future(_call(dull, "Offer"))
        async with open_channel(served.address, credentials) as channel:
            assert await _proved(channel, "Link") == [4, 5]
        with pytest.raises(grpc.aio.AioRpcError, match=r"munged has not answered for 0\.2 s") as refused:
            await call
    stuck.let_go.set()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


class Signalling(Absent):
    """Tells when it has made a credential."""

    def __init__(self) -> None:
        self.issued = threading.Event()

    def issue(self, payload: str) -> str:
        self.issued.set()
        return "token"


@pytest.mark.parametrize("turns", range(6))
async def test_a_caller_cancelled_in_whichever_turn_its_credential_arrives_is_cancelled(turns: int) -> None:
    munge = Signalling()

    channel = open_channel("127.0.0.1:1", munge)

    async def calls() -> None:
        await credential_metadata(channel, LINK, FIRST_PING)
        await asyncio.get_running_loop().create_future()  # the call

    calling = asyncio.create_task(calls())
    await asyncio.sleep(0)  # a thread is asked
    assert munge.issued.wait(60)
    for _ in range(turns):
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling}, timeout=60)
    assert calling.cancelled()
    await channel.close()


async def test_a_stuck_munge_at_the_server_ends_the_call(credentials: SecretCredentials) -> None:
    stuck = Stuck()
    async with Served(stuck, 0.1) as served, open_channel(served.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"munged has not answered for 0\.1 s") as refused:
            await _call(channel, "Fetch")
        stuck.let_go.set()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_taken_port_is_told(served: Served, credentials: SecretCredentials) -> None:
    with pytest.raises(ListenError, match=f"can't listen on {served.address}"):
        bind(make_server(credentials, COORDINATOR), served.address)


@pytest.mark.parametrize("host", ["127.0.0.1", "", "[::1]", "localhost"])
def test_an_address_is_tried_without_listening(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if host != "[::1]":
            with pytest.raises(ListenError, match=rf"can't listen on {host}:{port}: is it in use"):
                check_listen_address(f"{host}:{port}")
    check_listen_address(f"{host or '127.0.0.1'}:{port}")


@pytest.mark.parametrize("address", ["192.0.2.1:7070", "no.such.host.invalid:7070", "7070"])
def test_an_address_that_is_not_this_hosts_is_told(address: str) -> None:
    with pytest.raises(ListenError, match="not an address of this host"):
        check_listen_address(address)


async def test_no_host_means_all_addresses(credentials: SecretCredentials) -> None:
    server = make_server(credentials, COORDINATOR)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(Probe(), server)
    port = bind(server, ":0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", credentials) as channel:
        assert (await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(nonce="n"))).nonce == "n"
    await server.stop(None)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4242", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4242", "::1"),
        ("ipv6:[fe80::1%25eth0]:4242", "fe80::1"),
        ("ipv6:[::ffff:10.0.0.7]:4242", "10.0.0.7"),
        ("unix:", "unix"),
    ],
)
def test_a_peers_name_gives_its_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyError("a bug"), True),
        (grpc.aio.UsageError("the call is over"), False),
        (asyncio.InvalidStateError(), False),
        (asyncio.CancelledError(), False),
        (None, False),
    ],
)
async def test_of_what_ends_a_streams_task_bugs_alone_are_raised(error: BaseException | None, raised: bool) -> None:
    async def ends() -> None:
        if error is not None:
            raise error

    task = asyncio.create_task(ends())
    await asyncio.wait({task})
    with pytest.raises(KeyError) if raised else contextlib.nullcontext():
        raise_unexpected_error(task)


class SlowToEnd(Peer):
    """Its streams need many turns of the event loop to end, as they do where thousands of them end at once."""

    def __init__(self) -> None:
        self.under_way = 0

    async def Link(  # type: ignore[override]
        self, request_iterator: AsyncIterator[peer_pb2.LinkPing], context: Any
    ) -> None:
        self.under_way += 1
        try:
            await super().Link(request_iterator, context)
        finally:
            for _ in range(20_000):
                with contextlib.suppress(asyncio.CancelledError):  # gRPC cancels a call twice
                    await asyncio.sleep(0)
            self.under_way -= 1


async def test_a_server_has_stopped_when_the_handlers_of_its_calls_have_ended(tmp_path: Path) -> None:
    """gRPC does not wait for them. An event loop that ends before they do logs a traceback for each."""
    credentials, servicer = SecretCredentials.create(tmp_path / "secret"), SlowToEnd()
    server = make_server(credentials, COORDINATOR)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", credentials) as channel:
        for _ in range(3):
            metadata = await credential_metadata(channel, LINK, FIRST_PING)
            call: Any = peer_pb2_grpc.PeerServiceStub(channel).Link(metadata=metadata)
            await call.write(FIRST_PING)
            await call.read()
        assert servicer.under_way == 3
        await stop_server(server, 0.0)
        assert servicer.under_way == 0
