"""The line to this node's musterd, which keeps memory while a job is requeued (protos/muster/v1/memory.proto).

Standard library alone: Slurm's prolog must be quick.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from muster.daemon.agent import packet

SOCKET = "/run/muster/memory.sock"
MOST_SHARDS = 64
"""Memfds of one gang on one node, beside that of their descriptions."""
MOST_FDS = 1 + MOST_SHARDS


def ask(
    path: str, request: packet.Message, fds: Sequence[int] = (), *, timeout_s: float = 2.0
) -> tuple[packet.Message, list[int]]:
    """One request (a MemoryRequest as JSON), with memfds; waits for the answer (a MemoryAnswer) and its memfds.

    Args:
        path: where musterd listens.
        fds: stay the caller's; those that come back are the caller's, too.
        timeout_s: how long musterd may take.

    Raises:
        OSError: nobody listens there (FileNotFoundError: nor will soon), or hung up, or took too long.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(timeout_s)
        line.connect(path)
        packet.send(line, request, list(fds))
        data, back = packet.receive_bytes(line, MOST_FDS)
    if not data:
        raise ConnectionResetError("musterd hung up without an answer")
    return json.loads(data), back
