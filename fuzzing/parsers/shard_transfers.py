"""Shards from other agents: an offer, then the bytes of a stream. A replica counts only with all of its bytes.

An input is an offer after its length (2 bytes, little-endian), and then what the holder sends when it is asked for the
pieces. The receiver is that of a real agent.
"""

import asyncio
import socket
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import ShardStore
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.replication.replica_receiver import ReplicaReceiver
from muster.checkpoint.store.streams.piece_fetch import fetch_pieces
from muster.checkpoint.store.streams.transport import Arrivals, Holder
from muster.checkpoint.testing.no_transport import NoTransport
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2

_LENGTH_BYTES = 2
_MOST_STREAM_BYTES = 64 << 10
"""What a pair of sockets takes in before anybody reads."""


class _Stranger(NoTransport):
    """The holder of every shard sends these bytes, whatever it is asked for."""

    def __init__(self, stream: bytes) -> None:
        self._stream = stream

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
        def connect(host: str, port: int, certificate: str) -> socket.socket:
            ours, theirs = socket.socketpair()
            theirs.sendall(self._stream)
            theirs.shutdown(socket.SHUT_WR)
            theirs.detach()
            return ours

        await fetch_pieces(holders, pieces, wanted, memory, 1, connect, arrivals)


def check(data: bytes) -> None:
    """`data` as an offer and a stream."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        offer = peer_pb2.ShardOffer.FromString(data[_LENGTH_BYTES:end])
    except DecodeError:
        return
    asyncio.run(_check(offer, data[end : end + _MOST_STREAM_BYTES]))


async def _check(offer: peer_pb2.ShardOffer, stream: bytes) -> None:
    threads = WorkerThreads()
    store = ShardStore(lambda: None)
    builder = ReplicaBuilder("g1", store, threads)
    receiver = ReplicaReceiver(
        "g1", "n1", store, builder, _Stranger(stream), lambda _: "n0:1", lambda _: "", lambda _: False
    )
    try:
        stored = await receiver.offer(offer)
        shard = store.replica(offer.rank, Version.from_wire(offer.version))
        assert stored.refused or shard is not None
        if shard is not None:
            assert shard.bytes == offer.bytes
            assert shard.digest == offer.digest
            assert not shard.corrupt_pieces()
    finally:
        store.drop(lambda _: True, "the check ends")
        builder.close()
        threads.close()
