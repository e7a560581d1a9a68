"""A gang in one process, for tests and benchmarks: keepers joined by real gRPC on loopback, and ranks without torch.

Everything but the ranks' bytes is what runs in production: sockets, memfds, digests, transfers, commits.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from muster.checkpoint.format import layout
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.training.agent_connection import AgentConnection, StartPoint
from muster.v1 import agent_pb2, common_pb2, peer_pb2, peer_pb2_grpc


@dataclass
class TorchlessRank:
    """One rank: it writes given bytes where a training would write tensors.

    Args:
        link: the line to its agent.
        rank, world_size: its place.
        durable: stands for the durable metadata; rank 0's only.
    """

    connection: AgentConnection
    rank: int
    world_size: int
    durable: bytes = b""
    slot_bytes: int = 0
    _cut: int = 0
    _header: int = 0
    _index: bytes = field(default=b"", repr=False)

    def join(self) -> StartPoint:
        """Ask where to start."""
        return self.connection.join()

    def layout(self, shared_bytes: int, own_room: int = 1 << 16) -> str:
        """Plan, and ask for slots: room for `shared_bytes` that replicas hold alike and an object of its own.

        Item 0 of the durable metadata is rank 0's shared bytes, item 100 + R is rank R's object.

        Returns:
            Why there are no slots, in words.
        """
        self._cut = layout.align_up(shared_bytes)
        self._header = self._cut + layout.align_up(layout.LENGTH_BYTES + own_room)
        published = [layout.PublishedItem(100 + self.rank, self._cut, None)]
        if self.rank == 0:
            published.insert(0, layout.PublishedItem(0, 0, shared_bytes))
        self._index = layout.ShardIndex(self.rank, self.world_size, tuple(published)).dump()
        end = self._header + len(self._index) + len(self.durable)
        self.slot_bytes = layout.align_up(end) + layout.FOOTER_BYTES
        return self.connection.request_slots(self.slot_bytes, self._header)

    def write(self, slot: int, shared: bytes, own: bytes) -> None:
        """Fill a slot, telling nobody."""
        view = self.connection.slots[slot]
        view[: len(shared)] = shared
        layout.write_object(view, self._cut, own)
        end = self._header + len(self._index)
        view[self._header : end] = self._index
        view[end : end + len(self.durable)] = self.durable
        footer = layout.Footer(self._cut, self._header, len(self._index), 0, len(self.durable))
        layout.write_footer(view, footer)

    def step(self, step: int, shared: bytes, own: bytes, wait_s: float = 0.0, *, in_turn: bool = False) -> bool:
        """Finish a step and snapshot it, out of turn where `wait_s` is given alone; False where no slot was free."""
        self.connection.report_progress(step)
        out_of_turn = wait_s > 0 and not in_turn
        slot = (
            self.connection.slot_for_any_step(step, 1, wait_s)
            if out_of_turn
            else self.connection.slot_for_scheduled_step(step, 1, wait_s)
        )
        if slot is None:
            self.connection.report_progress(step, skipped=True)
            return False
        self.write(slot, shared, own)
        self.connection.report_filled(slot, step)
        return True


def contents(shard: memoryview) -> Mapping[str, bytes]:
    """What a rehearsed rank had put into a shard."""
    footer = layout.read_footer(shard)
    return {
        "shared": bytes(shard[: footer.objects_offset]),
        "own": bytes(layout.read_object(shard, footer.objects_offset)),
    }


class _Service(peer_pb2_grpc.PeerServiceServicer):
    """A keeper behind a server; counts what is sent to it.

    While it is `deaf`, the leader's notices get lost; while `flowing` is clear, what is put here doesn't come on.
    `cut`: how often that was ended before it was whole.
    """

    def __init__(self, checkpoint_service: CheckpointService) -> None:
        self.checkpoint_service = checkpoint_service
        self.puts = 0
        self.sent_bytes = 0
        self.cut = 0
        self.deaf = False
        self.flowing = asyncio.Event()
        self.flowing.set()

    def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[peer_pb2.LinkPong]:
        raise NotImplementedError("liveness is no part of this")

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardNeed:
        self.sent_bytes += sum(len(piece.data) for piece in request.pieces)
        return await self.checkpoint_service.Offer(request, context)

    async def Put(self, request_iterator: AsyncIterable[peer_pb2.ShardData], context: Any) -> peer_pb2.ShardStored:
        self.puts += 1

        async def counted() -> AsyncIterator[peer_pb2.ShardData]:
            async for message in request_iterator:
                self.sent_bytes += len(message.data)
                await self.flowing.wait()
                yield message

        try:
            return await self.checkpoint_service.Put(counted(), context)
        except asyncio.CancelledError:
            self.cut += 1
            raise

    async def Fetch(self, request: peer_pb2.FetchRequest, context: Any) -> AsyncIterator[peer_pb2.ShardData]:
        async for message in self.checkpoint_service.Fetch(request, context):
            yield message

    async def Stored(self, request: peer_pb2.StoredReport, context: Any) -> peer_pb2.PeerAck:
        return await self.checkpoint_service.Stored(request, context)

    async def Committed(self, request: peer_pb2.CommitNotice, context: Any) -> peer_pb2.PeerAck:
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        return await self.checkpoint_service.Committed(request, context)


@dataclass
class InProcessNode:
    """An agent's keeper and the server before it."""

    checkpoint_service: CheckpointService
    peer_service: _Service
    server: grpc.aio.Server
    address: str

    def committed(self) -> Version:
        """The newest version that this node knows to be committed."""
        return Version.from_wire(self.checkpoint_service.committed())


class InProcessGang:
    """Nodes on loopback; of the nodes that carry ranks, each one's buddy is the next in order of names."""

    def __init__(self, gang_id: str) -> None:
        self.gang_id = gang_id
        self.nodes: dict[str, InProcessNode] = {}
        self.generation = 0
        self._channels: dict[str, grpc.aio.Channel] = {}

    def dial(self, address: str) -> Any:
        """A stub for an address; one channel each."""
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        return peer_pb2_grpc.PeerServiceStub(self._channels[address])

    async def add(self, *names: str) -> None:
        """Start nodes."""
        for name in names:
            checkpoint_service = CheckpointService(self.gang_id, name, self.dial, lambda: None)
            peer_service, server = _Service(checkpoint_service), grpc.aio.server()
            peer_pb2_grpc.add_PeerServiceServicer_to_server(peer_service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self.nodes[name] = InProcessNode(checkpoint_service, peer_service, server, f"127.0.0.1:{port}")

    async def lose(self, name: str) -> None:
        """A node and its memory are gone."""
        node = self.nodes.pop(name)
        await node.server.stop(0)
        await node.checkpoint_service.close()

    def begin(self, places: Mapping[int, str], restore: agent_pb2.RestorePlan | None = None) -> int:
        """Fence what ran and enlist every node for the next generation; returns its number."""
        for node in self.nodes.values():
            node.checkpoint_service.fence(self.generation)
        self.generation += 1
        order = self._order(places, restore)
        for node in self.nodes.values():
            node.checkpoint_service.apply_order(order)
        return self.generation

    def _order(self, places: Mapping[int, str], restore: agent_pb2.RestorePlan | None) -> agent_pb2.Order:
        ring = sorted(set(places.values()))
        buddy = {n: ring[(i + 1) % len(ring)] if len(ring) > 1 else "" for i, n in enumerate(ring)}
        order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=self.generation, world_size=len(places))
        order.members.extend(
            common_pb2.Member(node=n, peer_address=v.address, buddy=buddy.get(n, "")) for n, v in self.nodes.items()
        )
        order.places.extend(agent_pb2.RankPlace(rank=r, node=n) for r, n in places.items())
        if restore is not None:
            order.restore.CopyFrom(restore)
        return order

    def socket(self, rank: int, node: str) -> int:
        """The descriptor of a rank's new line to its agent."""
        return self.nodes[node].checkpoint_service.rank_socket(rank, self.generation).detach()

    def plan(self, version: Version, tier: int | None = None) -> agent_pb2.RestorePlan:
        """All sources of a version that stand anywhere; of one tier where that is given."""
        plan = agent_pb2.RestorePlan(version=version.to_wire())
        for name, node in self.nodes.items():
            for shard in node.checkpoint_service.shards():
                if Version.from_wire(shard.version) == version and tier in (None, shard.tier):
                    plan.sources.add(rank=shard.rank, tier=shard.tier, node=name, digest=shard.digest)
        return plan

    def newest(self, world_size: int) -> Version | None:
        """The newest version of which every rank's shard stands somewhere."""
        ranks: dict[Version, set[int]] = {}
        for node in self.nodes.values():
            for shard in node.checkpoint_service.shards():
                ranks.setdefault(Version.from_wire(shard.version), set()).add(shard.rank)
        return max((s for s, have in ranks.items() if len(have) == world_size), default=None)

    async def close(self) -> None:
        """Stop all."""
        for name in list(self.nodes):
            await self.lose(name)
        for channel in self._channels.values():
            await channel.close(None)
