"""One node's agent as a process of its own: its checkpoint service behind a gRPC server. It has no torch.

Everything is as in production but who gives the orders: a test or a benchmark, and no coordinator.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.v1 import agent_pb2

GANG = "g"
_COMMIT_TIMEOUT_S = 300.0
_POLL_S = 0.001


class NodeAgent:
    """Served by a `worker.Worker`. The service runs on an event loop in a thread, as the calls must not block it."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._gang = self._make_gang()
        self._gang.stream_count = None
        self._run(self._gang.add(node))
        self._generation = 0

    def _make_gang(self) -> InProcessGang:
        """What joins this node to the others."""
        return InProcessGang(GANG)

    def address(self) -> str:
        """Where the other agents reach this one: host:port."""
        return self._gang.nodes[self._node].address

    def apply_order(self, data: bytes) -> None:
        """Fence the generation before, and take an order."""
        order = agent_pb2.Order.FromString(data)

        async def apply() -> None:
            self._service.fence(self._generation)
            self._service.apply_order(order)
            self._generation = order.generation

        self._run(apply())

    def fence(self) -> None:
        """Fence the generation, and return when all that its ranks have filled is among the shards."""

        async def fence() -> None:
            self._service.fence(self._generation)
            ranks = self._service.progress()
            while any(self._service.is_digesting(rank, self._generation) for rank in ranks):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

        self._run(fence())

    def committed(self) -> tuple[int, int]:
        """Generation and step of the newest version that this node knows to be committed."""
        version = self._gang.nodes[self._node].committed()
        return version.generation, version.step

    def rank_socket(self, rank: int) -> socket.socket:
        """A rank's end of a new connection."""

        async def connect() -> socket.socket:
            return self._service.rank_socket(rank, self._generation)

        return self._run(connect())  # type: ignore[no-any-return]

    def shards(self) -> list[bytes]:
        """What this node holds: a serialized status of each shard."""

        async def collect() -> list[bytes]:
            return [shard.SerializeToString() for shard in self._service.shards()]

        return self._run(collect())  # type: ignore[no-any-return]

    def parities(self) -> list[bytes]:
        """A serialized status of each part of a parity that this node holds."""

        async def collect() -> list[bytes]:
            return [parity.SerializeToString() for parity in self._service.combined()]

        return self._run(collect())  # type: ignore[no-any-return]

    def wait_committed(self, generation: int, step: int) -> float:
        """The moment when this node knew that the version, or a newer one, is committed.

        Raises:
            TimeoutError: it never did.
        """
        version = Version(generation, step)

        async def wait() -> float:
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                while self._gang.nodes[self._node].committed() < version:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)  # as a coordinator learns of it: from outside
            return time.monotonic()

        return self._run(wait())  # type: ignore[no-any-return]

    def reserved_bytes(self) -> int:
        """Memory that this node keeps ready for ranks that may come."""
        return self._service.reserved_bytes()

    def wait_reserved(self, size: int) -> None:
        """Return when this node keeps at least `size` bytes ready.

        Raises:
            TimeoutError: it never does.
        """

        async def wait() -> None:
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                while self._service.reserved_bytes() < size:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

        self._run(wait())

    def flush_s(self, data: bytes, folder: str) -> float:
        """Seconds of a flush into the folder."""
        order = agent_pb2.FlushOrder.FromString(data)
        began = time.monotonic()
        self._run(self._service.flush(order, str(Path(folder))))
        return time.monotonic() - began

    @property
    def _service(self) -> CheckpointService:
        return self._gang.nodes[self._node].checkpoint_service

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
