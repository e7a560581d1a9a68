"""The checkpoint service of one rank's own node, in a thread of the process that trains: restores without other
processes."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.testing.gang_in_one_process import reported
from muster.checkpoint.testing.no_transport import NoTransport
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.v1 import agent_pb2, common_pb2

_TIMEOUT_S = 60.0
"""Seconds after which something will never come."""


class AgentInThread:
    """The service on its own event loop, as in an agent's process. It commits what its rank keeps, and knows no other
    rank.

    Args:
        rank: the rank that it serves; its node is nRANK.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.node = rank, f"n{rank}"
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.generation = 0
        self.connections: list[AgentConnection] = []
        self.declared: list[str] = []
        self.checkpoint_service: CheckpointService = self.call(self._make)

    def _make(self) -> CheckpointService:
        return CheckpointService("g", self.node, _no_peer, NoTransport(), self._changed)

    def _changed(self) -> None:
        self.declared.append(reported(self.checkpoint_service, self.rank).declared_phase)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, or await a coroutine function, on the service's loop."""

        async def run() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_TIMEOUT_S)

    def connect(self, further_rank: int = 0, plan: agent_pb2.RestorePlan | None = None) -> AgentConnection:
        """Fence, restore the newest shard, and connect the rank of the next generation. `further_rank`: serve this rank
        from now on, which has kept no state yet; 0: none. `plan`: what is restored instead."""
        self.rank = further_rank or self.rank
        self.call(self.checkpoint_service.fence, self.generation)
        self.generation += 1
        order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=self.generation)
        order.members.add(node=self.node, peer_address="-")
        order.places.add(rank=self.rank, node=self.node)
        shards = self.call(self.checkpoint_service.shards)
        if plan is not None:
            order.restore.CopyFrom(plan)
        elif shards:
            newest = max(shards, key=lambda s: (s.version.generation, s.version.step))
            order.restore.version.CopyFrom(newest.version)
            order.restore.sources.add(rank=newest.rank, tier=newest.tier, node=self.node, digest=newest.digest)
            order.restore.written_ranks = newest.rank + 1
        self.call(self.checkpoint_service.apply_order, order)
        end = self.call(self.checkpoint_service.rank_socket, self.rank, self.generation)
        self.connections.append(AgentConnection(end.detach(), self.rank, self.generation))
        return self.connections[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition of the service."""
        end = time.monotonic() + _TIMEOUT_S
        while not self.call(condition):
            assert time.monotonic() < end, "it never came to that"
            time.sleep(0.001)

    def await_committed(self, step: int) -> None:
        """Wait until a step is committed."""
        self.until(lambda: self.checkpoint_service.committed().step == step)

    def flush(self, step: int, folder: Path | str, ranks: Iterable[int] = (0,)) -> Path:
        """Write this rank's part of a version to durable storage; returns the version's folder. `ranks`: all that
        write."""
        version = common_pb2.Version(generation=self.generation, step=step)
        order = agent_pb2.FlushOrder(serial=1, version=version, reason="test")
        for rank in ranks:
            order.sources.add(rank=rank, tier=agent_pb2.TIER_OWN, node=f"n{rank}")
        self.call(self.checkpoint_service.flush, order, str(folder))
        return Path(folder) / f"step_{step:08}_g{self.generation}_g"

    def close(self) -> None:
        """End the service and its thread, and free the memory."""
        for connection in self.connections:
            connection.close()
        self.call(self.checkpoint_service.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def _no_peer(node: str, address: str) -> Any:
    raise AssertionError(f"there is no other node, and {node} is called at {address}")
