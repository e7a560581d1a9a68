"""The holder's side of streams: pieces of granted shards, to whoever has the grant's token."""

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import digest_of
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams import stream_sockets
from muster.checkpoint.store.streams.stream_sockets import StreamSecurity
from muster.checkpoint.store.streams.transport import PieceAccess
from muster.checkpoint.store.streams.unknown_connections import UnknownConnections
from muster.daemon.host import clock

log = logging.getLogger(__name__)

_RETRY_S = 0.1
"""Seconds after a connection that could not be taken."""


@dataclass(frozen=True)
class ServerLimits:
    """What a port of pieces bears."""

    streams: int = 256
    """Streams at once, each with a thread and with the token of a grant."""
    unknown: int = 64
    """Connections at once whose token has not come yet, each with a thread."""
    token_s: float = stream_sockets.CONNECT_S
    """Seconds for the whole token to come."""


@dataclass(eq=False)
class ShardGrant:
    """A shard that others may fetch. Threads of the server use it, so its fields change under `lock`."""

    shard: Shard
    access: PieceAccess
    changed: str = ""
    changed_numbers: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _connections: set[socket.socket] = field(default_factory=set)
    _ended: bool = False
    _sent_bytes: int = 0
    _began: float | None = None
    _last: float = 0.0

    @property
    def sent(self) -> tuple[int, float]:
        """Bytes that were fetched, and seconds from the first request to the last byte."""
        with self.lock:
            return self._sent_bytes, self._last - self._began if self._began is not None else 0.0

    def join(self, connection: socket.socket) -> bool:
        """Count a connection as one of this grant's. False: the grant has ended."""
        with self.lock:
            if not self._ended:
                self._connections.add(connection)
            return not self._ended

    def leave(self, connection: socket.socket) -> None:
        """The connection is about to be closed."""
        with self.lock:
            self._connections.discard(connection)

    def piece(self, number: int) -> memoryview | None:
        """The bytes of a piece, not verified. They stay mapped while the view lives. None: the grant has ended.

        Raises:
            CorruptShard: there is no such piece.
        """
        with self.lock:
            if self._ended:
                return None
            if number >= len(self.shard.pieces):
                raise CorruptShard(f"a request for piece {number} of {len(self.shard.pieces)}")
            self._began = clock.monotonic() if self._began is None else self._began
            return self.shard.piece(number)

    def is_intact(self, number: int) -> bool | None:
        """Whether a piece has the bytes of its digest. If not, the grant says so. None: the grant has ended.

        Raises:
            CorruptShard: there is no such piece.
        """
        data = self.piece(number)
        intact = data is not None and digest_of(data) == self.shard.pieces[number].digest
        with self.lock:
            if self._ended:  # the memory is in use again
                return None
            if not intact and number not in self.changed_numbers:
                self.changed_numbers.append(number)
                rank, version = self.shard.rank, self.shard.version
                self.changed = f"piece {number} of rank {rank}'s shard of {version} has changed in memory"
                log.error("%s", self.changed)
        return intact

    def note_sent(self, count: int) -> None:
        """A piece of `count` bytes is being sent."""
        with self.lock:
            self._sent_bytes += count
            self._last = clock.monotonic()

    def end(self) -> None:
        """Send nothing more: the shard's memory may be used again."""
        with self.lock:
            self._ended = True
            for connection in self._connections:
                stream_sockets.cut(connection)


class PieceServer:
    """Serves granted shards on one port.

    Args:
        listener: a socket that listens. The server closes it.
        security: with what the streams are encrypted; None: plain text.
    """

    def __init__(self, listener: socket.socket, security: StreamSecurity | None, limits: ServerLimits) -> None:
        self._listener = listener
        self._security = security
        self._port = int(listener.getsockname()[1])
        self._grants: dict[bytes, ShardGrant] = {}
        self._closed = threading.Event()
        self._limits = limits
        self._unknown = UnknownConnections(limits.unknown)
        self._free_streams = threading.BoundedSemaphore(limits.streams)
        self._thread = threading.Thread(target=self._accept, name="pieces", daemon=True)
        self._thread.start()

    @contextmanager
    def grant(self, shard: Shard) -> Iterator[ShardGrant]:
        """Let others fetch the pieces of `shard` inside the `with` block."""
        certificate = self._security.certificate if self._security is not None else ""
        token = secrets.token_bytes(stream_sockets.TOKEN_BYTES)
        grant = ShardGrant(shard, PieceAccess(self._port, token, certificate))
        self._grants[token] = grant
        try:
            yield grant
        finally:
            del self._grants[token]
            grant.end()

    def close(self) -> None:
        """Take no further connections, and end those that there are."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._unknown.close()
        for grant in list(self._grants.values()):
            grant.end()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # the other side is gone already, or this process has too many files open
                if self._closed.wait(_RETRY_S):
                    return
                continue
            try:
                connection = self._prepared(connection)
            except OSError:  # the other side is gone already
                connection.close()
                continue
            host = str(address[0])
            self._unknown.add(connection, host)
            threading.Thread(target=self._serve, args=(connection, host), name="piece stream", daemon=True).start()

    def _prepared(self, connection: socket.socket) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._security is None:
            return connection
        return self._security.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                grant = self._identified(connection, host)
                if grant is None:
                    return
                if not self._free_streams.acquire(blocking=False):
                    log.warning("a stream of pieces is refused: %d are open", self._limits.streams)
                    return
                try:
                    self._serve_pieces(connection, grant)
                finally:
                    self._free_streams.release()
        except OSError as error:
            log.debug("a stream of pieces has ended: %s", error)
        except CorruptShard as error:
            log.error("a stream of pieces is ended: %s", error)

    def _identified(self, connection: socket.socket, host: str) -> ShardGrant | None:
        """The grant whose token comes over a new connection; None: it has come too late, or there is no such grant."""
        try:
            token = stream_sockets.read_token(connection, clock.monotonic() + self._limits.token_s)
        finally:
            known = self._unknown.leave(connection, host)
        return self._grants.get(token) if known else None

    def _serve_pieces(self, connection: socket.socket, grant: ShardGrant) -> None:
        if not grant.join(connection):
            return
        stream_sockets.limit_waits(connection, stream_sockets.QUIET_S)
        try:
            while (request := stream_sockets.read_request(connection)) is not None:
                first, count = request
                if not count:
                    intact = grant.is_intact(first)
                    if intact is None:
                        return
                    connection.sendall(stream_sockets.INTACT if intact else stream_sockets.CHANGED)
                for number in range(first, first + count):
                    data = grant.piece(number)
                    if data is None:
                        return
                    grant.note_sent(len(data))  # before: the receiver may be done before this thread goes on
                    connection.sendall(data)
        finally:
            grant.leave(connection)
