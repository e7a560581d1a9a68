"""Shards from other agents: an offer, then messages with pieces. A replica counts only with all of its bytes.

An input is a sequence of messages, each after its length (2 bytes, little-endian). The first one is the offer. All go
to the receiver of a real agent.
"""

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.shards import ShardStore
from muster.checkpoint.store.replication.replica_builder import ReplicaBuilder
from muster.checkpoint.store.replication.replica_receiver import ReplicaReceiver
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1 import peer_pb2

_LENGTH_BYTES = 2


def messages_of(data: bytes) -> list[peer_pb2.ShardData]:
    """The messages of an input."""
    found = []
    while len(data) >= _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        found.append(peer_pb2.ShardData.FromString(data[_LENGTH_BYTES:end]))
        data = data[end:]
    return found


def check(data: bytes) -> None:
    """`data` as a sequence of messages."""
    try:
        messages = messages_of(data)
    except DecodeError:
        return
    asyncio.run(_check(messages))


async def _check(messages: list[peer_pb2.ShardData]) -> None:
    threads = WorkerThreads()
    store = ShardStore(lambda: None)
    builder = ReplicaBuilder("g1", store, threads)
    receiver = ReplicaReceiver("g1", store, builder, lambda _: "", lambda _: False)
    try:
        if messages and messages[0].HasField("offer"):
            need = await receiver.offer(messages[0].offer)
            _check_stored(store, messages[0].offer, complete=not need.missing and not need.refused)
        stored = await receiver.put(_stream(messages))
        if messages and messages[0].HasField("offer"):
            _check_stored(store, messages[0].offer, complete=not stored.refused)
    finally:
        store.drop(lambda _: True, "the check ends")
        builder.close()
        threads.close()


async def _stream(messages: list[peer_pb2.ShardData]) -> AsyncIterator[peer_pb2.ShardData]:
    for message in messages:
        yield message


def _check_stored(store: ShardStore, offer: peer_pb2.ShardOffer, *, complete: bool) -> None:
    shard = store.replica(offer.rank, Version.from_wire(offer.version))
    assert not complete or shard is not None
    if shard is not None:
        assert shard.bytes == offer.bytes
        assert shard.digest == offer.digest
        assert not shard.corrupt_pieces()
