"""The part of PeerService that serves shards, for an agent whose shards nothing looks at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from muster.v1 import peer_pb2


class NoShards:
    """Answers each call for shards, and has none."""

    async def Offer(self, request: Any, context: Any) -> peer_pb2.ShardStored:
        return peer_pb2.ShardStored()

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.ShardOffer]:
        yield peer_pb2.ShardOffer()

    async def Stored(self, request: Any, context: Any) -> peer_pb2.PeerAck:
        return peer_pb2.PeerAck()

    async def Committed(self, request: Any, context: Any) -> peer_pb2.PeerAck:
        return peer_pb2.PeerAck()
