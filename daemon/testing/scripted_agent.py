"""An agent without processes: it attaches, obeys orders at once, and does what a test tells it. Real sockets, no
sleeps.

It speaks the wire protocol of muster-agent (whole statuses, a ProbeService at its address), so tests with it cover the
coordinator's whole protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from muster.daemon.transport import call_binding
from muster.daemon.transport.channel import (
    RECONNECT_TIMEOUT_S,
    bind,
    credential_metadata,
    make_server,
    open_channel,
)
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.reachability import ProbeService
from muster.daemon.transport.server_limits import ORDER_BYTES, agent_limits
from muster.daemon.transport.tls import ServerKey, Trust
from muster.v1 import agent_pb2 as pb
from muster.v1 import agent_pb2_grpc, common_pb2, common_pb2_grpc


class ScriptedAgent:
    """The agent of `gang` on `node`.

    `hello`, `status`: what it says and reports. `orders`: all orders that it received. `certificate`: the newest
    that it received. `release`: what the coordinator that dismissed it said of its version.
    """

    def __init__(
        self,
        node: str,
        spec: common_pb2.JobSpec,
        credentials: Credentials,
        *,
        gang: str = "g1",
        job: int = 1,
        restarts: int = 0,
        batch_host: bool = False,
        incarnation: str = "a",
        pool: int = 0,
        trust: Trust | None = None,
    ) -> None:
        """`trust`: whom to take for a coordinator; None: plain text."""
        self.node = node
        self.status = pb.AgentStatus()
        self.orders: list[pb.Order] = []
        self.terms: list[int] = []
        self.pongs: list[int] = []
        self.dismissed = ""
        self.release = common_pb2.Release()
        self.ignored_probes: set[str] = set()
        self.unreachable: dict[str, pb.Silence.ValueType] = {}
        self.measured: list[pb.MeasureOrder] = []
        self.link: pb.LinkMeasurement | None = None
        """What this agent answers to an order to measure, but for the number; None: nothing."""
        self._credentials = credentials
        self.certificate = pb.Certificate()
        self._trust = trust
        self._key = ServerKey(call_binding.name_of_agent(gang, node)) if trust else None
        self.hello = pb.AgentHello(
            gang_id=gang, slurm_job_id=job, slurm_restart_count=restarts, node=node,
            incarnation=f"{node}-{incarnation}", spec=spec, batch_host=batch_host, pool_serial=pool,
            public_key=self._key.public_key if self._key else b"",
        )  # fmt: skip
        self._changed = asyncio.Event()
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._server: grpc.aio.Server | None = None
        self._stores = 0
        self._wrote_after_the_end = False
        self._order: pb.Order | None = None

    async def open(self) -> None:
        """Listen for probes and peers."""
        names = frozenset({call_binding.name_of_agent(self.hello.gang_id, self.node)})
        self._server = make_server(self._credentials, agent_limits(members=2), server_names=lambda: names)
        common_pb2_grpc.add_ProbeServiceServicer_to_server(
            ProbeService(self.node, "agent", self.hello.incarnation), self._server
        )
        port = bind(self._server, "127.0.0.1:0", self._key.certificates() if self._key else None)
        self.hello.peer_address = f"127.0.0.1:{port}"
        await self._server.start()

    async def attach(self, coordinator: str) -> None:
        """Run one stream, from hello to its end. Raises grpc.aio.AioRpcError if the coordinator aborts it."""
        async with open_channel(
            coordinator,
            self._credentials,
            trust=self._trust,
            receive_bytes=ORDER_BYTES,
            connect_s=RECONNECT_TIMEOUT_S,
        ) as channel:
            self.hello.certified_by = self._key.certified_by if self._key else b""
            first = pb.AgentMessage(hello=self.hello)
            metadata = await credential_metadata(channel, "/muster.v1.AgentService/Attach", first)
            stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
            self._call = stub.Attach(metadata=metadata)
            await self._write(first)
            await self._send()
            try:
                async for message in self._call:
                    self.terms.append(message.term)
                    await self._process(message)
                    self._note_change()
            except grpc.aio.AioRpcError as error:
                # grpc.aio says INTERNAL, in place of the status, if a write of its own has found the call ended.
                if error.code() is not grpc.StatusCode.INTERNAL or not self._wrote_after_the_end:
                    raise

    async def die(self) -> None:
        """End as a process does: its kernel closes every connection and refuses new ones."""
        self.close_stream()
        if self._server:
            await self._server.stop(0)

    async def stop_answering(self) -> None:
        """Stop to answer probes. The stream to the coordinator stays open."""
        if self._server:
            await self._server.stop(0)

    def close_stream(self) -> None:
        """Close the stream. The agent lives on."""
        if self._call:
            self._call.cancel()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`. It is evaluated after every message and every action."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    @property
    def address(self) -> str:
        """host:port at which the agent answers probes."""
        return self.hello.peer_address

    @property
    def duty(self) -> str:
        """The duty of the newest order: "RUN 2"."""
        order = self._order
        return f"{pb.Duty.Name(order.duty).removeprefix('DUTY_')} {order.generation}" if order else ""

    async def step(self, count: int = 1) -> None:
        """Report `count` more finished steps of every rank on this node."""
        for rank in self.status.ranks:
            rank.step, rank.progressed = rank.step + count, True
        await self._send()

    async def log(self, first_step: int, step: int) -> None:
        """Report that the numbers of generation 1 name these steps, its first and its newest one."""
        training = pb.NodeTraining(generation=1, step=step, first_step=first_step, first_at_s=1.0)
        self.status.training.CopyFrom(training)
        await self._send()

    async def report_shards(self, generation: int, step: int, ranks: list[int]) -> None:
        """Report that this node holds the shards of `ranks` at this version, those of other nodes as replicas."""
        del self.status.shards[:]
        own, version = {rank.rank for rank in self.status.ranks}, common_pb2.Version(generation=generation, step=step)
        for rank in ranks:
            tier = pb.TIER_OWN if rank in own else pb.TIER_BUDDY
            self.status.shards.add(rank=rank, version=version, tier=tier, bytes=8, digest=f"{rank}@{step}")
        self.status.committed.CopyFrom(common_pb2.Version(generation=generation, step=step))
        await self._send()

    async def end_ranks(self, exit_code: int, stderr: str = "") -> None:
        """Report the end of every rank on this node."""
        for rank in self.status.ranks:
            rank.phase, rank.exit_code, rank.stderr_tail = pb.RANK_PHASE_EXITED, exit_code, stderr
        await self._send()

    async def accuse(self, node: str, silence: pb.Silence.ValueType) -> None:
        """Accuse `node`: this agent no longer hears it."""
        self.unreachable[node] = silence
        await self._write(pb.AgentMessage(accusation=pb.Accusation(node=node, silence=silence)))

    async def ping(self, seq: int) -> None:
        """Ping the coordinator."""
        await self._write(pb.AgentMessage(ping=pb.AgentPing(seq=seq)))

    async def _send(self) -> None:
        try:
            await self._write(pb.AgentMessage(status=self.status))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self._wrote_after_the_end = True  # the next stream starts with the status
        self._note_change()

    async def _write(self, message: pb.AgentMessage) -> None:
        """Write one message at a time: of two simultaneous writes grpc.aio drops one and ends the call silently."""
        async with self._writing:
            await self._call.write(message)

    def _note_change(self) -> None:
        self._changed.set()

    async def _process(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "order":
                self.orders.append(message.order)
                self._order = message.order
                await self._obey(message.order)
            case "probe":
                await self._probe(message.probe)
            case "measure":
                await self._measure(message.measure)
            case "certificate":
                self.certificate = message.certificate
                if self._key:
                    self._key.use(self.certificate.certificate)
            case "pong":
                self.pongs.append(message.pong.seq)
            case "dismissed":
                self.dismissed, self.release = message.dismissed, message.release

    async def _obey(self, order: pb.Order) -> None:
        before = self.status.SerializeToString(deterministic=True)
        if order.duty == pb.DUTY_FENCE:
            self._fence(order)
        elif order.duty == pb.DUTY_RUN:
            self._run(order)
        elif order.duty == pb.DUTY_EXIT:
            del self.status.ranks[:]
        if order.HasField("flush"):
            self.status.flushed_serial = order.flush.serial
        self.status.order_serial = order.serial
        if self.status.SerializeToString(deterministic=True) != before:
            await self._send()

    def _fence(self, order: pb.Order) -> None:
        kept = [rank for rank in self.status.ranks if rank.generation > order.generation]
        del self.status.ranks[:]
        self.status.ranks.extend(kept)
        self.status.fenced_generation = max(self.status.fenced_generation, order.generation)
        following = order.generation + 1
        if order.store_node == self.node and self.status.store_generation != following:
            self._stores += 1
            self.status.store_generation, self.status.store_port = following, 20000 + self._stores

    def _run(self, order: pb.Order) -> None:
        here = {rank.rank for rank in self.status.ranks if rank.generation == order.generation}
        for place in order.places:
            if place.node == self.node and place.rank not in here:
                self.status.ranks.add(
                    rank=place.rank, local_rank=place.local_rank, generation=order.generation,
                    phase=pb.RANK_PHASE_RUNNING, step=order.restore.version.step,
                )  # fmt: skip

    async def _probe(self, order: pb.ProbeOrder) -> None:
        if order.node in self.ignored_probes:
            return
        silence = self.unreachable.get(order.node)
        result = pb.ProbeResult(probe_id=order.probe_id, node=order.node, answered=silence is None)
        if silence is not None:
            result.silence = silence
        await self._write(pb.AgentMessage(probe_result=result))

    async def _measure(self, order: pb.MeasureOrder) -> None:
        self.measured.append(order)
        if self.link:
            answer = pb.LinkMeasurement(number=order.number)
            answer.MergeFrom(self.link)
            await self._write(pb.AgentMessage(link_measurement=answer))
