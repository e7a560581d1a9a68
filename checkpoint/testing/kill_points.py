"""Labelled points on the way of a snapshot from a slot to its commit and to storage, at which an agent's process is
killed.

The points are in what an agent gives its checkpoint service: how it calls other agents, how bytes travel, and the
server in front of the service. So the service has no code for tests, and `kill -9` leaves what it leaves on a node. The
points of a flush are its operations on storage, by the labels of `CrashingStore`.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.flush.retention import Retention
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.streams import stream_sockets
from muster.checkpoint.store.streams.transport import Arrivals, Holder
from muster.checkpoint.testing.crashing_store import CrashingStore
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, ObservedTransport, PeerService
from muster.checkpoint.testing.node_agent import GANG, NodeAgent
from muster.v1 import agent_pb2, peer_pb2


class KillPoint(StrEnum):
    """Where a process can be killed."""

    OFFERING = "the sender has digested its slot, and offered nothing"
    OFFERED = "the receiver has an offer, and has asked for nothing"
    STREAMING = "the receiver has some bytes of a piece"
    FETCHED = "the receiver has all pieces, and the replica does not count yet"
    SEALED = "the receiver's replica counts, and the sender has not heard so"
    COPIED = "the sender has heard that its replica counts"
    REPORTING = "a node's replicas count, and the commit leader has not heard so"
    COUNTING = "the commit leader has a report, and has not counted it"
    COUNTED = "the commit leader has counted a report, and has not acknowledged it"
    DECIDED = "the commit leader has decided, and told nobody"
    ANNOUNCED = "a follower has acknowledged the decision"
    HEARING = "a follower has a decision, and has not taken it"
    HEARD = "a follower has taken a decision, and has not acknowledged it"


@dataclass(frozen=True)
class _Armed:
    point: KillPoint
    step: int
    pid: int


class KillPoints:
    """The points of one process, of which at most one is armed."""

    def __init__(self) -> None:
        self._armed: _Armed | None = None

    def arm(self, point: KillPoint, step: int, pid: int = 0) -> None:
        """Kill a process, by default this one, when this one passes the point with what belongs to `step`."""
        self._armed = _Armed(point, step, pid or os.getpid())

    def passes(self, point: KillPoint, step: int | None = None) -> None:
        """This process is at a point. `step`: what it is about; None: nobody knows."""
        armed = self._armed
        if armed is not None and armed.point == point and step in (None, armed.step):
            self._armed = None
            _kill(armed.pid)


def _kill(pid: int) -> None:
    death = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([death], [], [])  # what another process still did would depend on chance
    os.close(death)


class _Stub:
    """Calls of another agent."""

    def __init__(self, stub: Any, points: KillPoints) -> None:
        self._stub, self._points = stub, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def Offer(self, offer: peer_pb2.ShardOffer, timeout: float) -> Any:
        self._points.passes(KillPoint.OFFERING, offer.version.step)
        stored = await self._stub.Offer(offer, timeout=timeout)
        self._points.passes(KillPoint.COPIED, offer.version.step)
        return stored

    async def Stored(self, report: peer_pb2.StoredReport, timeout: float) -> Any:
        self._points.passes(KillPoint.REPORTING, report.version.step)
        return await self._stub.Stored(report, timeout=timeout)

    async def Committed(self, notice: peer_pb2.CommitNotice, timeout: float) -> Any:
        self._points.passes(KillPoint.DECIDED, notice.version.step)
        ack = await self._stub.Committed(notice, timeout=timeout)
        self._points.passes(KillPoint.ANNOUNCED, notice.version.step)
        return ack


class _Server(PeerService):
    """Calls from other agents."""

    def __init__(self, checkpoint_service: CheckpointService, points: KillPoints) -> None:
        super().__init__(checkpoint_service)
        self._points = points

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardStored:
        self._points.passes(KillPoint.OFFERED, request.version.step)
        stored = await super().Offer(request, context)
        if not stored.refused:
            self._points.passes(KillPoint.SEALED, request.version.step)
        return stored

    async def Stored(self, request: peer_pb2.StoredReport, context: Any) -> peer_pb2.PeerAck:
        self._points.passes(KillPoint.COUNTING, request.version.step)
        ack = await super().Stored(request, context)
        self._points.passes(KillPoint.COUNTED, request.version.step)
        return ack

    async def Committed(self, request: peer_pb2.CommitNotice, context: Any) -> peer_pb2.PeerAck:
        self._points.passes(KillPoint.HEARING, request.version.step)
        ack = await super().Committed(request, context)
        self._points.passes(KillPoint.HEARD, request.version.step)
        return ack


class _Transport(ObservedTransport):
    """Bytes from other agents."""

    def __init__(self, points: KillPoints) -> None:
        super().__init__()
        self._points = points

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
        await super().fetch(holders, pieces, wanted, memory, arrivals, restoring=restoring)
        self._points.passes(KillPoint.FETCHED)

    def _connect(self, host: str, port: int, certificate: str) -> socket.socket:
        return _Connection(stream_sockets.connect(host, port, certificate), self._points)


class _Connection(socket.socket):
    def __init__(self, connection: socket.socket, points: KillPoints) -> None:
        super().__init__(fileno=connection.detach())
        self._points = points

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, nbytes, flags)
        if count:
            self._points.passes(KillPoint.STREAMING)
        return count


class _Store(CrashingStore):
    """A store at which this process is killed, in the middle of its first operation with a label if that has one."""

    def __init__(self, store: DurableStore, label: str) -> None:
        super().__init__(store, sys.maxsize)
        self._label = label

    def do(self, label: str, work: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        """Do one operation, or die."""
        if label == self._label:
            if half is not None:
                half()
            _kill(os.getpid())
        return super().do(label, work, half)


class _Gang(InProcessGang):
    """One node, and how it reaches the others."""

    def __init__(self, points: KillPoints) -> None:
        super().__init__(GANG)
        self._points = points

    def dial(self, node: str, address: str) -> Any:
        return _Stub(super().dial(node, address), self._points)

    def _make_transport(self) -> ObservedTransport:
        return _Transport(self._points)

    def _serve(self, checkpoint_service: CheckpointService) -> PeerService:
        return _Server(checkpoint_service, self._points)


class MortalAgent(NodeAgent):
    """A node's agent that is killed where a test says."""

    def _make_gang(self) -> InProcessGang:
        self._points = KillPoints()
        return _Gang(self._points)

    def arm(self, point: KillPoint, step: int, pid: int = 0) -> None:
        """As `KillPoints.arm`."""
        self._points.arm(point, step, pid)

    def begin_flush(self, data: bytes, folder: str, label: str = "") -> None:
        """Begin a flush. `label`: of the operation at which this process is killed; empty: of none."""
        order = agent_pb2.FlushOrder.FromString(data)
        store = _Store(PosixFolder(Path(folder)), label)
        work = self._service._flusher.flush(order, store, Retention(keep=1))
        self._flush = asyncio.run_coroutine_threadsafe(work, self._loop)
