"""The agents of a gang as processes, and the orders that a coordinator would give them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from muster.checkpoint.format.versions import Version
from muster.checkpoint.testing.node_agent import NodeAgent
from muster.checkpoint.testing.worker import Worker, WorkerFailed
from muster.v1 import agent_pb2, common_pb2


class Gang:
    """Agents by node. A context manager: its exit ends the agents.

    Args:
        make_agent: makes the agent of a node in its process.
        start_method: of these processes, as `multiprocessing` calls it.
    """

    def __init__(self, make_agent: Callable[[str], NodeAgent] = NodeAgent, start_method: str = "spawn") -> None:
        self._make_agent, self._context = make_agent, multiprocessing.get_context(start_method)
        self._agents: dict[str, Worker] = {}
        self._addresses: dict[str, str] = {}
        self.generation = 0

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove(*self._agents)

    def add(self, *nodes: str) -> None:
        """Start the agents of nodes."""
        for node in nodes:
            self._agents[node] = Worker(self._context, self._make_agent, node)
            self._addresses[node] = self._agents[node].call("address")

    def remove(self, *nodes: str) -> None:
        """End the agents of nodes, with all that they hold."""
        for node in nodes:
            self._agents.pop(node).close()
            del self._addresses[node]

    @property
    def pids(self) -> list[int]:
        """The processes of the agents."""
        return [pid for agent in self._agents.values() if (pid := agent.process.pid) is not None]

    def process(self, node: str) -> BaseProcess:
        """The process of an agent."""
        process: BaseProcess = self._agents[node].process
        return process

    def call(self, node: str, method: str, *arguments: Any) -> Any:
        """Call a method of one agent."""
        return self._agents[node].call(method, *arguments)

    def fence(self) -> None:
        """Fence the generation on all nodes. What its ranks have filled counts, and nothing is copied or committed."""
        self._call_all("fence")

    def begin(
        self,
        places: Mapping[int, str],
        buddies: Mapping[str, str],
        restore: agent_pb2.RestorePlan | None = None,
        parity_group: Collection[str] = (),
    ) -> int:
        """Start the next generation; returns its number.

        Args:
            places: the node of each rank.
            buddies: which node keeps the copies of a node's shards.
            restore: what the generation starts from; None: a fresh start.
            parity_group: nodes that hold the parity of their states together.
        """
        self.generation += 1
        order = agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=self.generation, world_size=len(places))
        order.members.extend(
            common_pb2.Member(node=node, peer_address=address, buddy=buddies.get(node, ""))
            for node, address in self._addresses.items()
        )
        order.places.extend(agent_pb2.RankPlace(rank=rank, node=node) for rank, node in places.items())
        if parity_group:
            order.parity_groups.add(nodes=parity_group)
        if restore is not None:
            order.restore.CopyFrom(restore)
        self._call_all("apply_order", order.SerializeToString())
        return self.generation

    def connect(self, rank: int, node: str) -> int:
        """The descriptor of a rank's connection to its agent. The caller owns it."""
        return int(self._agents[node].call("rank_socket", rank))

    def committed_at(self, step: int) -> float:
        """The moment (time.monotonic) from which all agents know that a step of this generation is committed."""
        return float(max(self._call_all("wait_committed", self.generation, step)))

    def committed(self) -> list[Version]:
        """For each node, the newest version that it knows to be committed."""
        return [Version(*found) for found in self._call_all("committed")]

    def shards(self) -> dict[str, list[agent_pb2.ShardStatus]]:
        """What each node holds."""
        held = zip(self._agents, self._call_all("shards"), strict=True)
        return {node: [agent_pb2.ShardStatus.FromString(data) for data in shards] for node, shards in held}

    @property
    def reserved_bytes(self) -> int:
        """What all nodes without ranks keep ready for ranks that may come."""
        return sum(self._call_all("reserved_bytes"))

    def wait_reserved(self, node: str, size: int) -> None:
        """Return when a node keeps `size` bytes ready."""
        self._agents[node].call("wait_reserved", size)

    def shard(self, rank: int, node: str, tier: int) -> agent_pb2.ShardStatus:
        """A node's newest shard of a rank in its slots or among its copies.

        Raises:
            LookupError: it has none.
        """
        shards = [agent_pb2.ShardStatus.FromString(data) for data in self._agents[node].call("shards")]
        found = [s for s in shards if (s.rank, s.tier) == (rank, tier)]
        if not found:
            raise LookupError(f"{node} holds no shard of rank {rank}: {shards}")
        return max(found, key=lambda s: Version.from_wire(s.version))

    def plan(self, rank: int, node: str, tier: int) -> agent_pb2.RestorePlan:
        """The restore of one rank from a node."""
        shard = self.shard(rank, node, tier)
        plan = agent_pb2.RestorePlan(version=shard.version)
        plan.sources.add(rank=rank, tier=shard.tier, node=node, digest=shard.digest)
        return plan

    def parity_plan(self, places: Mapping[int, str], lost: int) -> agent_pb2.RestorePlan:
        """The restore of all ranks from their own nodes, and of a lost one from the parity of all."""
        plan = agent_pb2.RestorePlan()
        for rank, node in places.items():
            if rank != lost:
                plan.sources.extend(self.plan(rank, node, agent_pb2.TIER_OWN).sources)
                plan.version.CopyFrom(self.shard(rank, node, agent_pb2.TIER_OWN).version)
        for node, agent in self._agents.items():
            for parity in map(agent_pb2.ParityStatus.FromString, agent.call("parities")):
                digest = parity.digests[list(parity.ranks).index(lost)]
                if digest and parity.version == plan.version:
                    source = plan.sources.add(rank=lost, tier=agent_pb2.TIER_PARITY, node=node, digest=digest)
                    source.parity_ranks.extend(parity.ranks)
                    source.parity_part = parity.part
        return plan

    def flush_all(self, method: str, serial: int, step: int, folder: str, **extra: str) -> None:
        """Have each node flush what it holds in its slots of a step of this generation.

        Args:
            method: of the agents.
            serial: larger each time.
            step: which one.
            folder: on storage.
            extra: one more argument of the method, by node. Such a node may end meanwhile.
        """
        order = agent_pb2.FlushOrder(serial=serial, version=Version(self.generation, step).to_wire(), reason="a test")
        for node, shards in self.shards().items():
            for shard in shards:
                if shard.tier == agent_pb2.TIER_OWN and shard.version == order.version:
                    order.sources.add(rank=shard.rank, node=node, tier=shard.tier)
        for node, agent in self._agents.items():
            agent.start(method, order.SerializeToString(), folder, *([extra[node]] if node in extra else []))
        for node, agent in self._agents.items():
            with suppress(WorkerFailed) if node in extra else nullcontext():
                agent.result()

    def flush_s(self, node: str, serial: int, folder: str) -> float:
        """Seconds in which a node writes its newest shard of rank 0 into a folder. `serial`: larger each time."""
        plan = self.plan(0, node, agent_pb2.TIER_OWN)
        order = agent_pb2.FlushOrder(serial=serial, version=plan.version, reason="bench")
        order.sources.extend(plan.sources)
        return float(self._agents[node].call("flush_s", order.SerializeToString(), folder))

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        for agent in self._agents.values():
            agent.start(method, *arguments)
        return [agent.result() for agent in self._agents.values()]
