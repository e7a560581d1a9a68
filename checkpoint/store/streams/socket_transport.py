"""Pieces over TCP, plain or encrypted."""

import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager

from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.streams.piece_fetch import fetch_pieces
from muster.checkpoint.store.streams.piece_server import PieceServer, ServerLimits, ShardGrant
from muster.checkpoint.store.streams.stream_sockets import StreamSecurity
from muster.checkpoint.store.streams.transport import Arrivals, Holder

MOST_STREAMS = 8
"""Streams of one transfer. One stream carries about 3 GB/s, digests included, and takes a core on either side."""
CORES_PER_STREAM = 4
"""The other cores are left to the training."""
RESTORE_CORES_PER_STREAM, LEAST_RESTORE_STREAMS = 2, 2
"""During a restore nobody trains. One stream leaves a core idle now and then, whatever the other side does."""

_LIMITS = ServerLimits()


def streams_with(cores: int) -> tuple[int, int]:
    """Streams of one transfer on a node with so many cores: beside the training, and of a restore."""
    copying = max(1, min(MOST_STREAMS, cores // CORES_PER_STREAM))
    return copying, max(LEAST_RESTORE_STREAMS, min(MOST_STREAMS, cores // RESTORE_CORES_PER_STREAM))


class SocketTransport:
    """A `PieceTransport` over TCP.

    Args:
        listener: a socket that listens, on which other nodes fetch this node's pieces. The transport closes it.
        security: with what this node's streams are encrypted; None: plain text.
        stream_count: streams of one transfer; None: by the number of cores, and more for a restore.
        limits: what its port bears.
    """

    def __init__(
        self,
        listener: socket.socket,
        security: StreamSecurity | None = None,
        stream_count: int | None = None,
        limits: ServerLimits = _LIMITS,
    ) -> None:
        self._server = PieceServer(listener, security, limits)
        copying, restoring = streams_with(len(os.sched_getaffinity(0)))
        self._stream_count, self._restore_stream_count = stream_count or copying, stream_count or restoring

    def streams_of(self, *, restoring: bool) -> int:
        """How many streams a transfer has."""
        return self._restore_stream_count if restoring else self._stream_count

    def grant(self, shard: Shard) -> AbstractContextManager[ShardGrant]:
        """Let others fetch the pieces of `shard` inside a `with` block."""
        return self._server.grant(shard)

    async def fetch(
        self,
        holders: Sequence[Holder],
        pieces: Sequence[Piece],
        wanted: Sequence[int],
        memory: SealedMemory,
        arrivals: Arrivals | None = None,
        *,
        restoring: bool = False,
    ) -> None:
        """Fetch the numbered pieces into their places in `memory`."""
        streams = self.streams_of(restoring=restoring)
        await fetch_pieces(holders, pieces, wanted, memory, streams, arrivals=arrivals)

    def close(self) -> None:
        """End all transfers."""
        self._server.close()
