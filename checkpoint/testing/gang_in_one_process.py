"""A gang in one process, for tests and benchmarks: agents' checkpoint services joined by gRPC, and ranks without torch.

Everything but the ranks' bytes is as in production: sockets, memfds, digests, transfers, commits.
"""

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from muster.checkpoint.format import layout
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.replication.replica_receiver import LOCAL_SLOT_WAIT_S
from muster.checkpoint.store.streams import stream_sockets
from muster.checkpoint.store.streams.piece_fetch import fetch_pieces
from muster.checkpoint.store.streams.socket_transport import SocketTransport
from muster.checkpoint.store.streams.transport import Arrivals, Holder
from muster.checkpoint.training.agent_connection import AgentConnection, SnapshotCost, StartPoint
from muster.v1 import agent_pb2, common_pb2, peer_pb2, peer_pb2_grpc


def durable_metadata_of(ranks: Collection[int]) -> bytes:
    """What stands for the durable metadata of torchless ranks: it names the items that each of them publishes."""
    numbers = (0, *(100 + rank for rank in ranks))
    items = [(f"item{n}", layout.offset_placeholder(n), layout.length_placeholder(n)) for n in numbers]
    return pickle.dumps(items, 4)


@dataclass
class TorchlessRank:
    """One rank. It writes given bytes in the place of a training state.

    Args:
        connection: the connection to its agent.
        rank, world_size: the rank's number, and the number of ranks.
        durable_metadata: the bytes that stand for the durable metadata; empty on all ranks but 0.
        replica_group: the shared bytes are compared with those of the ranks of this group; 0: with none.
    """

    connection: AgentConnection
    rank: int
    world_size: int
    durable_metadata: bytes = b""
    slot_bytes: int = 0
    replica_group: int = 0
    _objects_offset: int = 0
    _header_offset: int = 0
    _index: bytes = field(default=b"", repr=False)

    def join(self) -> StartPoint:
        """Ask the agent where to start."""
        return self.connection.join()

    def layout(self, shared_bytes: int, object_capacity: int = 1 << 16) -> str:
        """Plan a shard and request slots for it: `shared_bytes` that all replicas share, and one object of the rank.

        In the durable metadata, item 0 is rank 0's shared bytes, and item 100 + R is the object of rank R.

        Returns:
            Why there are no slots; empty if there are.
        """
        self._objects_offset = layout.align_up(shared_bytes)
        self._header_offset = self._objects_offset + layout.align_up(layout.LENGTH_BYTES + object_capacity)
        published = [layout.PublishedItem(100 + self.rank, self._objects_offset, None)]
        if self.rank == 0:
            published.insert(0, layout.PublishedItem(0, 0, shared_bytes))
        self._index = layout.ShardIndex(self.rank, self.world_size, tuple(published)).dump()
        end = self._header_offset + len(self._index) + len(self.durable_metadata)
        self.slot_bytes = layout.align_up(end) + layout.FOOTER_BYTES
        return self.connection.request_slots(self.slot_bytes, self._header_offset)

    def write(self, slot: int, shared: bytes, own: bytes) -> None:
        """Fill a slot with the shared bytes and the rank's own object, and do not report it."""
        view = self.connection.slots[slot]
        view[: len(shared)] = shared
        layout.write_object(view, self._objects_offset, own)
        end = self._header_offset + len(self._index)
        view[self._header_offset : end] = self._index
        view[end : end + len(self.durable_metadata)] = self.durable_metadata
        footer = layout.Footer(
            self._objects_offset,
            self._header_offset,
            len(self._index),
            0,
            len(self.durable_metadata),
            self._objects_offset if self.replica_group else 0,
            self.replica_group,
        )
        layout.write_footer(view, footer)

    def step(
        self,
        step: int,
        shared: bytes,
        own: bytes,
        wait_s: float = 0.0,
        *,
        scheduled: bool = False,
        cost: SnapshotCost | None = None,
    ) -> bool:
        """Finish a step and take its snapshot; returns False if no slot was free.

        Args:
            step: the finished step.
            shared, own: what to write.
            wait_s: seconds to wait for a slot.
            scheduled: with a wait, take only the slot for the step that all ranks keep next, instead of any slot.
            cost: what the snapshot cost, as the rank reports it; None: nothing.
        """
        self.connection.report_progress(step)
        if wait_s > 0 and not scheduled:
            slot = self.connection.slot_for_any_step(step, wait_s)
        else:
            slot = self.connection.slot_for_scheduled_step(step, wait_s)
        if slot is None:
            self.connection.report_progress(step, skipped=True)
            return False
        self.write(slot, shared, own)
        self.connection.report_filled(slot, step, cost or SnapshotCost())
        return True


def contents(shard: memoryview) -> Mapping[str, bytes]:
    """What a torchless rank has written into a shard."""
    footer = layout.read_footer(shard)
    own = bytes(layout.read_object(shard, footer.objects_offset))
    return {"shared": bytes(shard[: footer.objects_offset]), "own": own}


class ObservedTransport(SocketTransport):
    """Sockets on the loopback interface. Counts what this node fetches from others.

    `stream_count`: streams of one transfer; None: as many as in production.
    `flows`: while this event is clear, nothing is fetched.
    `cancelled`: how many fetches were cancelled before they were complete.
    `damages`: in so many chunks of pieces that come next, one bit arrives wrong.
    """

    def __init__(self, stream_count: int | None = 1) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0)), stream_count=stream_count)
        self.fetches = 0
        self.fetched_bytes = 0
        self.cancelled = 0
        self.damages = 0
        self.flows = asyncio.Event()
        self.flows.set()

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
        self.fetches += 1
        try:
            await self.flows.wait()
            streams = self.streams_of(restoring=restoring)
            await fetch_pieces(holders, pieces, wanted, memory, streams, self._connect, arrivals)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.fetched_bytes += sum(pieces[n].length for n in wanted)

    def _connect(self, host: str, port: int, certificate: str) -> socket.socket:
        return _DamagingSocket(stream_sockets.connect(host, port, certificate), self)


class _DamagingSocket(socket.socket):
    """A connection on which bits arrive wrong, as `transport` says."""

    def __init__(self, connection: socket.socket, transport: ObservedTransport) -> None:
        super().__init__(fileno=connection.detach())
        self._transport = transport

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, nbytes, flags)
        if count and self._transport.damages and len(buffer) > len(stream_sockets.INTACT):
            self._transport.damages -= 1
            buffer[0] ^= 1
        return count


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """A checkpoint service behind a server. It counts the bytes of pieces that others put into their offers.

    `drops_decisions`: announcements of the commit leader are refused.
    """

    def __init__(self, checkpoint_service: CheckpointService) -> None:
        self.checkpoint_service = checkpoint_service
        self.offered_bytes = 0
        self.drops_decisions = False

    def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[peer_pb2.LinkPong]:
        raise NotImplementedError("pings are no part of the checkpoint service")

    async def OpenSink(self, request: peer_pb2.SinkRequest, context: Any) -> peer_pb2.SinkReply:
        raise NotImplementedError("measurements are no part of the checkpoint service")

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardStored:
        self.offered_bytes += sum(len(piece.data) for piece in request.pieces)
        return await self.checkpoint_service.Offer(request, context)

    async def Fetch(self, request: peer_pb2.FetchRequest, context: Any) -> AsyncIterator[peer_pb2.ShardOffer]:
        async with aclosing(self.checkpoint_service.Fetch(request, context)) as offers:
            async for offer in offers:
                yield offer

    async def Stored(self, request: peer_pb2.StoredReport, context: Any) -> peer_pb2.PeerAck:
        return await self.checkpoint_service.Stored(request, context)

    async def Committed(self, request: peer_pb2.CommitNotice, context: Any) -> peer_pb2.PeerAck:
        if self.drops_decisions:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "decisions are dropped")
        return await self.checkpoint_service.Committed(request, context)


def reported(service: CheckpointService, rank: int) -> agent_pb2.RankStatus:
    """What the agent with this service would report of what the rank has said of itself."""
    status = agent_pb2.RankStatus(rank=rank)
    service.rank_reports.add_to(status)
    return status


@dataclass
class InProcessNode:
    """One agent's checkpoint service, how its pieces travel, and the server in front of it."""

    checkpoint_service: CheckpointService
    transport: ObservedTransport
    peer_service: PeerService
    server: grpc.aio.Server
    address: str

    @property
    def received_bytes(self) -> int:
        """The bytes of pieces that other nodes have brought here."""
        return self.peer_service.offered_bytes + self.transport.fetched_bytes

    def committed(self) -> Version:
        """The newest version that this node knows to be committed."""
        return Version.from_wire(self.checkpoint_service.committed())


class InProcessGang:
    """Nodes on the loopback interface. With `parity_groups` they have parities, as an order names them. Otherwise each
    node with ranks has the next one by name as buddy, and the `more_copies` nodes after that hold replicas, too."""

    def __init__(self, gang_id: str) -> None:
        self.gang_id = gang_id
        self.nodes: dict[str, InProcessNode] = {}
        self.generation = 0
        self.agreed_groups: tuple[int, ...] = ()
        self.replicas_differ = False
        self.more_copies = 0
        self.parity_groups: Sequence[Sequence[str]] = ()
        self.slot_wait_s = LOCAL_SLOT_WAIT_S
        self.stream_count: int | None = 1
        self._channels: dict[str, grpc.aio.Channel] = {}

    def dial(self, node: str, address: str) -> Any:
        """A stub for the agent on a node, at its address. All stubs of an address share one channel."""
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        return peer_pb2_grpc.PeerServiceStub(self._channels[address])

    async def add(self, *names: str) -> None:
        """Start nodes."""
        for name in names:
            transport = self._make_transport()
            checkpoint_service = CheckpointService(
                self.gang_id, name, self.dial, transport, lambda: None, slot_wait_s=self.slot_wait_s
            )
            peer_service, server = self._serve(checkpoint_service), grpc.aio.server()
            peer_pb2_grpc.add_PeerServiceServicer_to_server(peer_service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self.nodes[name] = InProcessNode(checkpoint_service, transport, peer_service, server, f"127.0.0.1:{port}")

    def _make_transport(self) -> ObservedTransport:
        """How a new node's pieces travel."""
        return ObservedTransport(self.stream_count)

    def _serve(self, checkpoint_service: CheckpointService) -> PeerService:
        """What answers other nodes."""
        return PeerService(checkpoint_service)

    async def lose(self, name: str) -> None:
        """Stop a node and free its memory."""
        node = self.nodes.pop(name)
        await node.server.stop(0)
        await node.checkpoint_service.close()

    def begin(self, places: Mapping[int, str], restore: agent_pb2.RestorePlan | None = None) -> int:
        """Fence the present generation and send every node the order for the next one; returns its number."""
        for node in self.nodes.values():
            node.checkpoint_service.fence(self.generation)
        self.generation += 1
        order = self._order(places, restore)
        for node in self.nodes.values():
            node.checkpoint_service.apply_order(order)
        return self.generation

    def _order(self, places: Mapping[int, str], restore: agent_pb2.RestorePlan | None) -> agent_pb2.Order:
        ring = sorted(set(places.values()))
        following = {name: [*ring[i + 1 :], *ring[:i]] for i, name in enumerate(ring)}
        order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=self.generation, world_size=len(places))
        order.members.extend(
            common_pb2.Member(
                node=name,
                peer_address=node.address,
                buddy="" if self.parity_groups else next(iter(following.get(name, ())), ""),
                more_buddies=following.get(name, [])[1 : 1 + self.more_copies],
            )
            for name, node in self.nodes.items()
        )
        order.places.extend(agent_pb2.RankPlace(rank=rank, node=name) for rank, name in places.items())
        order.agreed_groups.extend(self.agreed_groups)
        order.parity_groups.extend(common_pb2.ParityGroup(nodes=group) for group in self.parity_groups)
        order.replicas_differ = self.replicas_differ
        if restore is not None:
            order.restore.CopyFrom(restore)
        return order

    def socket(self, rank: int, node: str) -> int:
        """The descriptor of a rank's new connection to its agent."""
        return self.nodes[node].checkpoint_service.rank_socket(rank, self.generation).detach()

    def plan(self, version: Version, tier: int | None = None) -> agent_pb2.RestorePlan:
        """A restore plan with all shards of a version that any node holds; `tier`: only shards of this tier."""
        plan = agent_pb2.RestorePlan(version=version.to_wire())
        for name, node in self.nodes.items():
            for shard in node.checkpoint_service.shards():
                if Version.from_wire(shard.version) == version and tier in (None, shard.tier):
                    plan.sources.add(rank=shard.rank, tier=shard.tier, node=name, digest=shard.digest)
        copied = {source.rank for source in plan.sources}
        for name, node in self.nodes.items():
            for parity in node.checkpoint_service.combined():
                for rank, digest in zip(parity.ranks, parity.digests, strict=True):
                    if digest and Version.from_wire(parity.version) == version and rank not in copied:
                        source = plan.sources.add(rank=rank, tier=agent_pb2.TIER_PARITY, node=name, digest=digest)
                        source.parity_ranks.extend(parity.ranks)
                        source.parity_part = parity.part
        return plan

    def newest(self, world_size: int) -> Version | None:
        """The newest version of which the nodes hold every rank's shard."""
        ranks: dict[Version, set[int]] = {}
        for node in self.nodes.values():
            for shard in node.checkpoint_service.shards():
                ranks.setdefault(Version.from_wire(shard.version), set()).add(shard.rank)
        return max((version for version, held in ranks.items() if len(held) == world_size), default=None)

    async def close(self) -> None:
        """Stop all nodes."""
        for name in list(self.nodes):
            await self.lose(name)
        for channel in self._channels.values():
            await channel.close(None)
