"""The line to this node's musterd, which keeps memory while a job is requeued (protos/muster/v1/memory.proto).

Standard library alone: Slurm's prolog must be quick.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from muster.daemon.host import packets

SOCKET = "/run/muster/memory.sock"
MAX_SHARDS = 64
"""Memfds of one gang on one node, beside that of their descriptions."""
MAX_FDS = 1 + MAX_SHARDS


_AGAIN_S = 0.1


def send_request(
    path: str, request: packets.Message, fds: Sequence[int] = (), *, timeout_s: float = 2.0, patience_s: float = 0.0
) -> tuple[packets.Message, list[int]]:
    """One request (a MemoryRequest as JSON), with memfds; waits for the answer (a MemoryAnswer) and its memfds.

    Args:
        path: where musterd listens.
        fds: stay the caller's; those that come back are the caller's, too.
        timeout_s: how long musterd may take.
        patience_s: how long a musterd that is being started again (its socket is there, and nobody answers) is asked
            again.

    Raises:
        OSError: nobody listens there (FileNotFoundError: nor will soon), or hung up, or took too long (TimeoutError).
    """
    line, answer, back = open_request(path, request, fds, timeout_s=timeout_s, patience_s=patience_s)
    line.close()
    return answer, back


def open_request(
    path: str, request: packets.Message, fds: Sequence[int] = (), *, timeout_s: float = 2.0, patience_s: float = 0.0
) -> tuple[socket.socket, packets.Message, list[int]]:
    """As `send_request`, with the line still open: the caller closes it."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return _call(path, request, fds, timeout_s)
        except (FileNotFoundError, TimeoutError):
            raise
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_AGAIN_S)


def _call(
    path: str, request: packets.Message, fds: Sequence[int], timeout_s: float
) -> tuple[socket.socket, packets.Message, list[int]]:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(timeout_s)
        line.connect(path)
        packets.send(line, request, list(fds))
        data, back = packets.receive_bytes(line, MAX_FDS)
        if not data:
            raise ConnectionResetError("musterd hung up without an answer")
        return line, json.loads(data), back
    except BaseException:
        line.close()
        raise
