"""Client of this node's musterd, which keeps memory while a job is requeued (protos/muster/v1/memory.proto).

Uses the standard library only: Slurm's prolog must be fast.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from muster.daemon.host import packets

SOCKET = "/run/muster/memory.sock"
MAX_SHARDS = 64
"""Memfds of one gang on one node, without the memfd of their descriptions."""
MAX_FDS = 1 + MAX_SHARDS


_RETRY_S = 0.1


def send_request(
    path: str, request: packets.Message, fds: Sequence[int] = (), *, timeout_s: float = 2.0, retry_s: float = 0.0
) -> tuple[packets.Message, list[int]]:
    """Send one request (a MemoryRequest as JSON) with memfds; return the answer (a MemoryAnswer as JSON) and its
    memfds.

    Args:
        path: musterd's socket.
        fds: descriptors to send. The caller owns these, and those that are returned.
        timeout_s: seconds that musterd may take.
        retry_s: seconds for which to retry while musterd restarts (its socket exists, but nobody answers).

    Raises:
        OSError: nobody listens (FileNotFoundError: and no socket exists), musterd closed the connection, or the timeout
            has passed (TimeoutError).
    """
    connection, answer, received_fds = open_request(path, request, fds, timeout_s=timeout_s, retry_s=retry_s)
    connection.close()
    return answer, received_fds


def open_request(
    path: str, request: packets.Message, fds: Sequence[int] = (), *, timeout_s: float = 2.0, retry_s: float = 0.0
) -> tuple[socket.socket, packets.Message, list[int]]:
    """As `send_request`, but also return the open connection; the caller closes it."""
    end = time.monotonic() + retry_s
    while True:
        try:
            return _call(path, request, fds, timeout_s)
        except (FileNotFoundError, TimeoutError):
            raise
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_RETRY_S)


def _call(
    path: str, request: packets.Message, fds: Sequence[int], timeout_s: float
) -> tuple[socket.socket, packets.Message, list[int]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        packets.send(connection, request, list(fds))
        data, received_fds = packets.receive_bytes(connection, MAX_FDS)
        if not data:
            raise ConnectionResetError("musterd closed the connection without an answer")
        return connection, json.loads(data), received_fds
    except BaseException:
        connection.close()
        raise
