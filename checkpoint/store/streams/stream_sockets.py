"""The sockets of streams, and what travels on them.

The receiver connects to the holder's port and sends the token of the grant, 16 bytes. Then it asks for pieces: two
numbers of 4 bytes, the first piece and how many follow it. The holder answers with the bytes of these pieces and
nothing else. A holder that can't go on closes the connection.

The holder does not verify what it sends: the receiver does. If a piece does not match, the receiver opens a connection
for a question: the piece, and 0 for how many follow. The holder then verifies its own bytes of this piece, and answers
with INTACT or CHANGED, 8 bytes.

The sockets block, in threads of their own. The kernel keeps the time limits of plain ones, so that one call can take in
a whole chunk.
"""

import socket
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass

from muster.daemon.host import clock

REQUEST = struct.Struct("!II")
"""The first piece, and the number of pieces."""

INTACT, CHANGED = b"intact\0\0", b"changed\0"
"""Answers to the question whether a piece is what its digest says. No bit makes one of them the other."""

TOKEN_BYTES = 16
STREAM_BACKLOG = 64
"""Connections that wait to be accepted."""
CONNECT_S = 5.0
"""Seconds for a connection, and for the whole token to come over it."""
QUIET_S = 20.0
"""Seconds without a byte after which a stream is given up."""

_TIME = struct.Struct("@ll")
_NO_TIME_CHECK = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: the certificate is known byte by byte, so its dates say nothing."""


@dataclass(frozen=True)
class StreamSecurity:
    """With what this agent encrypts its streams: the context of its port, and the port's certificate (PEM)."""

    context: ssl.SSLContext
    certificate: str


def connect(
    host: str, port: int, certificate: str, connect_s: float = CONNECT_S, quiet_s: float = QUIET_S
) -> socket.socket:
    """A connection to a holder's port. With `certificate` it is encrypted, and the holder proves that it is its own.

    Raises:
        OSError: the holder can't be reached, or proves something else.
    """
    try:
        connection = socket.create_connection((host, port), timeout=connect_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if certificate:
                connection = _client_context(certificate).wrap_socket(connection)
            limit_waits(connection, quiet_s)
        except BaseException:
            connection.close()
            raise
    except TimeoutError:
        raise ConnectionError(f"no connection within {connect_s:.0f} s") from None
    return connection


def _client_context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_TIME_CHECK)
    return context


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Let each call on `connection` wait for so long at most; then it raises BlockingIOError or TimeoutError."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)  # a blocking one would try again after the kernel's limit, without end
        return
    connection.settimeout(None)
    limit = _TIME.pack(int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def cut(connection: socket.socket) -> None:
    """End a connection that another thread uses. Its next call raises OSError."""
    with suppress(OSError):
        # Not an encrypted socket's own method: that one gives up the encryption first, and what the other thread sends
        # at this moment would go in plain text.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def read_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from the connection.

    Raises:
        OSError: the other side has ended, or sends nothing.
    """
    # An encrypted socket knows no flags.
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(target):
        count = connection.recv_into(target, 0, flags)
        if not count:
            raise ConnectionError("it has ended the stream")
        target = target[count:]


def read_token(connection: socket.socket, deadline: float) -> bytes:
    """The token of a new connection, after the handshake if it is encrypted.

    Args:
        connection: blocks, and has no time limit of its own yet.
        deadline: by `clock.monotonic`. Single bytes now and then do not put it off.

    Raises:
        OSError: the other side has ended, or the token has not come in time.
    """
    token, missing = bytearray(TOKEN_BYTES), TOKEN_BYTES
    connection.settimeout(max(0.001, deadline - clock.monotonic()))
    if isinstance(connection, ssl.SSLSocket):
        connection.do_handshake()
    while missing:
        connection.settimeout(max(0.001, deadline - clock.monotonic()))
        count = connection.recv_into(memoryview(token)[TOKEN_BYTES - missing :])
        if not count:
            raise ConnectionError("it has ended the stream")
        missing -= count
    return bytes(token)


def read_request(connection: socket.socket) -> tuple[int, int] | None:
    """The next request: the first piece and how many. 0: is this one intact? None: the receiver has all that it wants.

    Raises:
        OSError: the receiver has ended inside a request, or sends nothing.
    """
    buffer = bytearray(REQUEST.size)
    count = connection.recv_into(buffer, 1)
    if not count:
        return None
    read_into(connection, memoryview(buffer)[count:])
    first, number = REQUEST.unpack(buffer)
    return first, number
