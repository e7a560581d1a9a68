"""Streams: pieces of shards over sockets, from one or several holders, plain and encrypted."""

import asyncio
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams import piece_fetch, stream_sockets
from muster.checkpoint.store.streams.piece_server import ServerLimits, ShardGrant
from muster.checkpoint.store.streams.socket_transport import SocketTransport, streams_with
from muster.checkpoint.store.streams.stream_sockets import StreamSecurity
from muster.checkpoint.store.streams.transport import FetchFailed, Holder, PieceAccess
from muster.checkpoint.store.streams.unknown_connections import UnknownConnections
from muster.daemon.host import clock
from muster.daemon.transport.tls import pinned_context
from muster.v1.agent_pb2 import TIER_OWN

PIECE = 1000
COUNT = 40


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@contextmanager
def transport(
    security: StreamSecurity | None = None, streams: int = 2, limits: ServerLimits | None = None
) -> Iterator[SocketTransport]:
    made = SocketTransport(listener(), security, streams, limits or ServerLimits())
    try:
        yield made
    finally:
        made.close()


def shard(count: int = COUNT) -> Shard:
    """A shard of random bytes, the same ones each time."""
    memory = SealedMemory("shard", count * PIECE)
    memory.view[:] = random.Random(7).randbytes(count * PIECE)
    pieces = tuple(Piece(n * PIECE, PIECE, digest_of(memory.view[n * PIECE : (n + 1) * PIECE])) for n in range(count))
    return Shard(0, Version(1, 1), TIER_OWN, pieces, shard_digest(pieces), memory, memory.close)


def holder(grant: ShardGrant, node: str = "n0", numbers: Sequence[int] = range(COUNT)) -> Holder:
    return Holder(node, "127.0.0.1", grant.access, frozenset(numbers))


def fetched(
    holders: Sequence[Holder],
    of: Shard,
    wanted: Sequence[int],
    streams: int = 2,
    connect: piece_fetch.Connect = stream_sockets.connect,
) -> SealedMemory:
    """The memory after a fetch of the `wanted` pieces."""
    memory = SealedMemory("target", of.bytes)
    asyncio.run(piece_fetch.fetch_pieces(holders, of.pieces, wanted, memory, streams, connect))
    return memory


def impatient(host: str, port: int, certificate: str) -> socket.socket:
    return stream_sockets.connect(host, port, certificate, connect_s=0.05, quiet_s=0.05)


def test_pieces_arrive_in_their_places_and_nothing_else_is_written() -> None:
    held = shard()
    with transport() as server, server.grant(held) as grant:
        wanted = [0, 1, 2, 7, 9, 10, COUNT - 1]
        memory = fetched([holder(grant)], held, wanted)
        for n, piece in enumerate(held.pieces):
            expected = bytes(held.piece(n)) if n in wanted else bytes(PIECE)
            assert memory.view[piece.offset : piece.offset + PIECE] == expected
        assert grant.sent[0] == len(wanted) * PIECE
        assert not grant.changed


@settings(max_examples=15, deadline=None)
@given(data=st.data(), streams=st.integers(1, 5))
def test_pieces_come_from_whoever_holds_them(data: st.DataObject, streams: int) -> None:
    held = shard()
    wanted = sorted(data.draw(st.sets(st.integers(0, COUNT - 1), min_size=1)))
    parts = data.draw(st.lists(st.sets(st.sampled_from(wanted)), min_size=0, max_size=3))
    # What nobody else has, the last one has.
    parts.append(set(wanted) - set().union(*parts))
    with ExitStack() as stack:
        grants = [stack.enter_context(stack.enter_context(transport()).grant(held)) for _ in parts]
        holders = [holder(g, f"n{i}", sorted(p)) for i, (g, p) in enumerate(zip(grants, parts, strict=True))]
        memory = fetched(holders, held, wanted, streams)
        assert all(memory.view[n * PIECE : (n + 1) * PIECE] == held.piece(n) for n in wanted)
        assert sum(g.sent[0] for g in grants) == len(wanted) * PIECE


@pytest.mark.parametrize(("cores", "copying", "restoring"), [(1, 1, 2), (2, 1, 2), (16, 4, 8), (128, 8, 8)])
def test_a_restore_may_use_more_cores_than_a_copy_beside_the_training(cores: int, copying: int, restoring: int) -> None:
    assert streams_with(cores) == (copying, restoring)


async def test_what_a_holder_can_not_give_comes_from_another_one() -> None:
    good, bad = shard(), shard()
    bad.memory.view[20 * PIECE] ^= 1
    with transport() as first, transport() as second, first.grant(bad) as damaged, second.grant(good) as whole:

        def connect(host: str, port: int, certificate: str) -> socket.socket:
            while port == whole.access.port and not damaged.changed:
                os.sched_yield()  # the damaged piece is asked of its first holder
            return stream_sockets.connect(host, port, certificate)

        memory = SealedMemory("target", good.bytes)
        holders = [holder(damaged, "n0"), holder(whole, "n1", range(10, COUNT))]
        await piece_fetch.fetch_pieces(holders, good.pieces, range(COUNT), memory, 1, connect)
        assert memory.view == good.memory.view
        assert damaged.changed == "piece 20 of rank 0's shard of step 1 of generation 1 has changed in memory"
        assert not whole.changed


class Seen:
    """What a fetch tells of arrivals."""

    def __init__(self) -> None:
        self.came: list[tuple[int, str]] = []
        self.bad: list[tuple[int, str]] = []

    def arrived(self, number: int, node: str) -> None:
        self.came.append((number, node))

    def damaged(self, number: int, node: str) -> None:
        self.bad.append((number, node))


@contextmanager
def holder_that_stops_after(given: int, held: Shard) -> Iterator[PieceAccess]:
    """A holder that gives the first pieces that it is asked for, and then nothing more, though it stays connected."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = slow.accept()
        with connection:
            connection.recv(16, socket.MSG_WAITALL)
            first, _ = stream_sockets.REQUEST.unpack(connection.recv(stream_sockets.REQUEST.size, socket.MSG_WAITALL))
            for number in range(first, first + given):
                connection.sendall(held.piece(number))
            done.wait()

    with listener() as slow:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield PieceAccess(slow.getsockname()[1], bytes(16))
        finally:
            done.set()
            thread.join()


async def test_a_holder_that_becomes_slow_is_replaced_and_no_piece_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_fetch, "SLOW_S", 0.02)
    monkeypatch.setattr(piece_fetch, "CHECK_S", 0.01)
    held, slow_has_given = shard(), threading.Event()

    def connect(host: str, port: int, certificate: str) -> socket.socket:
        if port == grant.access.port:
            slow_has_given.wait()
        return stream_sockets.connect(host, port, certificate)

    class SeenUntilSlow(Seen):
        def arrived(self, number: int, node: str) -> None:
            super().arrived(number, node)
            if len(self.came) == 3:
                slow_has_given.set()

    seen = SeenUntilSlow()
    with transport() as server, server.grant(held) as grant, holder_that_stops_after(3, held) as access:
        memory = SealedMemory("target", held.bytes)
        holders = [Holder("slow", "127.0.0.1", access, frozenset(range(COUNT))), holder(grant, "good")]
        await piece_fetch.fetch_pieces(holders, held.pieces, range(COUNT), memory, 1, connect, seen)
        assert memory.view == held.memory.view
        assert sorted(number for number, _ in seen.came) == list(range(COUNT))
        assert [node for _, node in seen.came].count("slow") == 3


async def test_a_fetch_does_not_wait_for_a_holder_that_takes_no_connection() -> None:
    held, connected = shard(), threading.Event()

    def connect(host: str, port: int, certificate: str) -> socket.socket:
        if port != grant.access.port:
            connected.wait()
            raise ConnectionError("no connection")
        return stream_sockets.connect(host, port, certificate)

    with transport() as server, server.grant(held) as grant:
        memory = SealedMemory("target", held.bytes)
        away = Holder("away", "127.0.0.1", PieceAccess(1, bytes(16)), frozenset(range(COUNT)))
        await piece_fetch.fetch_pieces([away, holder(grant, "good")], held.pieces, range(COUNT), memory, 1, connect)
        assert memory.view == held.memory.view
        connected.set()


def test_what_arrives_damaged_is_told() -> None:
    held, seen = shard(), Seen()
    lie = list(held.pieces)
    lie[5] = Piece(lie[5].offset, lie[5].length, bytes(16))
    memory = SealedMemory("target", held.bytes)
    with transport() as server, server.grant(held) as grant:
        with pytest.raises(FetchFailed, match=r"1 piece has not come \(n0: 3 pieces arrived damaged"):
            asyncio.run(piece_fetch.fetch_pieces([holder(grant)], lie, range(8), memory, 1, arrivals=seen))
        assert not grant.changed, "its own bytes are right"
    assert seen.came == [(n, "n0") for n in (0, 1, 2, 3, 4, 6, 7)]
    assert seen.bad == [(5, "n0")] * 3


async def test_a_holder_gives_what_has_not_changed_and_is_not_accused_of_the_rest() -> None:
    held, seen = shard(), Seen()
    memory = SealedMemory("target", held.bytes)
    held.memory.view[3 * PIECE] ^= 1
    held.memory.view[30 * PIECE] ^= 1
    with transport() as server, server.grant(held) as grant:
        with pytest.raises(FetchFailed, match=r"2 pieces have not come \(n0: piece 3 has changed in its memory"):
            await piece_fetch.fetch_pieces([holder(grant)], held.pieces, range(COUNT), memory, 1, arrivals=seen)
        assert grant.changed_numbers == [3, 30]
    assert {number for number, _ in seen.came} == set(range(COUNT)) - {3, 30}
    assert not seen.bad


def test_an_encrypted_holder_is_asked_whether_its_bytes_are_intact() -> None:
    held = shard()
    held.memory.view[3 * PIECE] ^= 1
    with (
        transport(StreamSecurity(*pinned_context())) as server,
        server.grant(held) as grant,
        pytest.raises(FetchFailed, match="piece 3 has changed in its memory"),
    ):
        fetched([holder(grant)], held, range(COUNT))


def test_a_fetch_names_each_holder_that_failed_and_why() -> None:
    held = shard()
    with listener() as gone:
        port = gone.getsockname()[1]
    with transport() as server, server.grant(held) as grant:
        away = replace(holder(grant, "n1"), access=replace(grant.access, port=port))
        stranger = replace(holder(grant, "n2"), access=replace(grant.access, token=bytes(16)))
        with pytest.raises(FetchFailed) as failed:
            fetched([away, stranger], held, range(COUNT))
    assert str(failed.value).startswith("40 pieces have not come (")
    assert "n1: [Errno 111] Connection refused" in str(failed.value)
    assert "n2: " in str(failed.value)
    with pytest.raises(FetchFailed, match="no holder has them"):
        fetched([], held, [0])


def test_a_grant_that_has_ended_gives_nothing() -> None:
    held = shard()
    with transport() as server:
        with server.grant(held) as grant:
            pass
        with pytest.raises(FetchFailed):
            fetched([holder(grant)], held, range(COUNT))
        assert grant.sent == (0, 0.0)


def test_a_transfer_ends_with_its_grant() -> None:
    held = shard()
    with transport() as server:
        with server.grant(held) as grant:
            connection = _stream(grant)
        with connection:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("request_bytes", [stream_sockets.REQUEST.pack(COUNT, n) for n in (0, 1)])
def test_a_request_of_no_piece_ends_its_stream_only(request_bytes: bytes) -> None:
    held = shard()
    with transport() as server, server.grant(held) as grant:
        with stream_sockets.connect("127.0.0.1", grant.access.port, "") as connection:
            connection.sendall(grant.access.token + request_bytes)
            assert connection.recv(1) == b""
        assert not grant.changed
        assert fetched([holder(grant)], held, range(COUNT)).view == held.memory.view


def _stream(grant: ShardGrant) -> socket.socket:
    """An open stream that has got piece 0."""
    connection = stream_sockets.connect("127.0.0.1", grant.access.port, "")
    connection.sendall(grant.access.token + stream_sockets.REQUEST.pack(0, 1))
    stream_sockets.read_into(connection, memoryview(bytearray(PIECE)))
    return connection


def test_so_many_streams_are_open_at_once_and_no_more() -> None:
    held = shard()
    with (
        transport(limits=ServerLimits(streams=1)) as server,
        server.grant(held) as grant,
        _stream(grant),
        pytest.raises(FetchFailed),
    ):
        fetched([holder(grant)], held, [0])


async def test_a_cancelled_fetch_writes_nothing_afterwards() -> None:
    held, asked, may_answer = shard(), threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = slow.accept()
        with connection:
            connection.recv(16 + stream_sockets.REQUEST.size, socket.MSG_WAITALL)
            asked.set()
            may_answer.wait()
            try:
                connection.sendall(held.piece(0))
            except OSError:
                return

    with listener() as slow, transport() as server, server.grant(held) as grant:
        thread = threading.Thread(target=serve)
        thread.start()
        access = replace(grant.access, port=slow.getsockname()[1])
        memory = SealedMemory("target", held.bytes)
        fetch = asyncio.create_task(
            piece_fetch.fetch_pieces([replace(holder(grant), access=access)], held.pieces, [0], memory, 1)
        )
        await asyncio.to_thread(asked.wait)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        may_answer.set()
        await asyncio.to_thread(thread.join)
        assert memory.view == bytes(held.bytes)


def test_streams_can_be_encrypted_and_the_holder_proves_its_certificate() -> None:
    held, security = shard(), StreamSecurity(*pinned_context())
    _, other = pinned_context()
    with transport(security) as server, server.grant(held) as grant:
        assert fetched([holder(grant)], held, range(COUNT)).view == held.memory.view
        with pytest.raises(FetchFailed, match="CERTIFICATE_VERIFY_FAILED"):
            fetched([replace(holder(grant), access=replace(grant.access, certificate=other))], held, [0])
        with pytest.raises(FetchFailed):  # in plain text
            fetched([replace(holder(grant), access=replace(grant.access, certificate=""))], held, [0])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_holder_that_falls_silent_is_given_up(encrypted: bool) -> None:
    context, certificate = pinned_context()
    held, done = shard(), threading.Event()

    def be_silent() -> None:
        connection, _ = silent.accept()
        with context.wrap_socket(connection, server_side=True) if encrypted else connection:
            done.wait()

    with listener() as silent:
        thread = threading.Thread(target=be_silent)
        thread.start()
        access = PieceAccess(silent.getsockname()[1], bytes(16), certificate if encrypted else "")
        with pytest.raises(FetchFailed, match="n0: nothing came"):
            fetched([Holder("n0", "127.0.0.1", access, frozenset(range(COUNT)))], held, [0], connect=impatient)
        done.set()
        thread.join()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_stranger_that_says_nothing_is_dropped(encrypted: bool) -> None:
    held = shard()
    security = StreamSecurity(*pinned_context()) if encrypted else None
    with (
        transport(security, limits=ServerLimits(token_s=0.05)) as server,
        server.grant(held) as grant,
        socket.create_connection(("127.0.0.1", grant.access.port), timeout=60) as stranger,
    ):
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("encrypted", [False, True])
def test_strangers_with_open_connections_keep_nobody_from_fetching(encrypted: bool) -> None:
    limits = ServerLimits(unknown=8, token_s=60.0)  # none of them ends by itself
    held = shard()
    security = StreamSecurity(*pinned_context()) if encrypted else None
    with transport(security, limits=limits) as server, server.grant(held) as grant, ExitStack() as stack:
        address = ("127.0.0.1", grant.access.port)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(20)]
        assert fetched([holder(grant)], held, range(COUNT), streams=3).view == held.memory.view
        assert strangers[0].recv(1) == b"", "the oldest one was dropped"
        strangers[-1].settimeout(0.01)
        with pytest.raises(TimeoutError):
            strangers[-1].recv(1)


def test_a_stream_with_a_token_lasts_however_many_strangers_come() -> None:
    held, limits = shard(), ServerLimits(unknown=2)
    with (
        transport(limits=limits) as server,
        server.grant(held) as grant,
        _stream(grant) as stream,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", grant.access.port)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(6)]
        assert [s.recv(1) for s in strangers[:4]] == [b""] * 4
        stream.sendall(stream_sockets.REQUEST.pack(1, 1))
        stream_sockets.read_into(stream, got := memoryview(bytearray(PIECE)))
        assert got == held.piece(1)


def test_the_address_with_the_most_unknown_connections_loses_its_oldest() -> None:
    unknown = UnknownConnections(most=3)
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(5)]
        addresses = ("::1", "10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.9")
        for (mine, _), address in zip(pairs, addresses, strict=True):
            unknown.add(mine, address)
        known = [unknown.leave(mine, address) for (mine, _), address in zip(pairs, addresses, strict=True)]
        assert known == [True, False, False, True, True]


def test_single_bytes_do_not_put_the_deadline_of_a_token_off() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"t")
        with pytest.raises(TimeoutError):
            stream_sockets.read_token(ours, clock.monotonic() - 1.0)


def test_a_holder_that_takes_no_connection_is_named_with_the_time_that_it_had() -> None:
    _, certificate = pinned_context()
    with listener() as mute:  # its kernel takes connections, and nobody begins a handshake
        access = PieceAccess(mute.getsockname()[1], bytes(16), certificate)
        with pytest.raises(FetchFailed, match="n0: no connection within 0 s"):
            fetched([Holder("n0", "127.0.0.1", access, frozenset(range(COUNT)))], shard(), [0], connect=impatient)
