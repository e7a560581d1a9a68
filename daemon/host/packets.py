"""Messages between the agent and its warm processes: JSON packets with file descriptors beside them.

Over a Unix socket of kind SOCK_SEQPACKET: one message a packet, an end of file when the other side has ended. Standard
library alone. The words:

    agent -> warm                                       warm -> agent
    {"do": "rank", "key", "env", "log", "cold"} + [sock]  {"say": "ready", "torch", "libuv", "notes", "seconds"}
    {"do": "store", "key", "avoid", "libuv"}              {"say": "started", "key", "pid", "cold": why or ""}
    {"do": "reap", "key"}                                 {"say": "refused", "key", "words"}  (the rank has no log)
                                                          {"say": "store", "key", "port"}     (from the store itself)
                                                          {"say": "exit", "key", "code", "tail"}
                                                          {"say": "gone", "key"}   (all that it had started, too)

`key` is the agent's name for a child. A child that has ended keeps its pid (as a zombie) until `reap`: so the agent
can't hit a stranger with its signals.
"""

from __future__ import annotations

import array
import json
import socket
from typing import Any

Message = dict[str, Any]

_BYTES = 1 << 20
_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection, with room for an environment of any sane size."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)
    return ends


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one message.

    Raises:
        OSError: the other side has ended, or (EMSGSIZE) the message is larger than the system lets one be.
    """
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], beside)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message with its descriptors (close-on-exec); None once the other side has ended.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing has arrived.
    """
    data, fds = receive_bytes(sock, _FDS)
    return (json.loads(data), fds) if data else None


def receive_bytes(sock: socket.socket, most_fds: int) -> tuple[bytes, list[int]]:
    """The next packet as it is, with at most so many descriptors (those beyond are closed); empty once the other side
    has ended.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing has arrived. TimeoutError: its timeout has passed.
    """
    fds = array.array("i")
    try:
        data, beside, _, _ = sock.recvmsg(_BYTES, socket.CMSG_SPACE(most_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    for level, kind, payload in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)
