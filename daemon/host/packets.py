"""Messages between the agent and its zygotes: JSON packets with file descriptors.

They use a Unix socket of type SOCK_SEQPACKET: one message per packet, end of file when the peer has ended. Uses the
standard library only. The messages:

    agent -> zygote                                     zygote -> agent
    {"argv", "preload", "learns", "env", "unset"} (the first one, + [1, 2] to a fork)
    {"do": "rank", "key", "env", "unset", "log", "cold"}  {"say": "ready", "torch", "libuv", "notes", "seconds"}
      + [sock]
    {"do": "store", "key", "avoid", "libuv"}              {"say": "started", "key", "pid", "cold": reason or ""}
    {"do": "learn", "words"}                              {"say": "imported", "words"}  (what the rank has imported)
                                                          {"say": "left", "name", "why"}  (what is not imported here)
                                                          {"say": "learned", "modules"}
    {"do": "reap", "key"}                                 {"say": "refused", "key", "words"}  (no log can be opened)
                                                          {"say": "store", "key", "port"}     (from the store itself)
                                                          {"say": "exit", "key", "code", "tail"}
                                                          {"say": "gone", "key"}   (its descendants have ended too)

`env` and `unset` are what differs from the zygote's own environment: that may be larger than a packet. `key` is the
agent's name for a child. A child that has ended keeps its pid (as a zombie) until `reap`, so that the
agent's signals can't reach another process with the same pid.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

Message = dict[str, Any]

MAX_BYTES = 1 << 20
_MAX_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection. A message may hold a large environment."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    return ends


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one message.

    Raises:
        OSError: the peer has ended, or (EMSGSIZE) the message exceeds the system's limit.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], ancillary)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message with its descriptors (close-on-exec); None after the peer has ended.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing has arrived.
    """
    data, fds = receive_bytes(sock, _MAX_FDS)
    return (json.loads(data), fds) if data else None


def receive_bytes(sock: socket.socket, most_fds: int) -> tuple[bytes, list[int]]:
    """Return the next packet unparsed, with at most `most_fds` descriptors (more are closed); empty after the peer has
    ended. A packet without bytes counts as that end, and its descriptors are closed.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing has arrived.
        TimeoutError: the socket's timeout has passed.
    """
    fds = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(most_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return b"", []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        for fd in fds:
            os.close(fd)
        return b"", []
    return data, list(fds)
