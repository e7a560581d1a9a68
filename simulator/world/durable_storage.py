"""Durable storage. The agents of a gang write a folder together; the folder is valid once every writer has finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.checkpoint.redundancy import wire
from muster.daemon.coordinator.core.state.events import Version
from muster.v1.agent_pb2 import FlushOrder

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World


@dataclass(slots=True)
class _Flush:
    """One flush of a gang: the version that each node holds, and the ranks whose shards are written."""

    version: Version
    held_versions: dict[str, Version] = field(default_factory=dict)
    written_shards: dict[int, Version] = field(default_factory=dict)


class DurableStorage:
    """All durable checkpoints. Until `fails_until` every write fails; until `hangs_until` no write finishes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._flushes: dict[tuple[str, int], _Flush] = {}
        self._folders: dict[tuple[str, str], Version] = {}
        self.fails_until = 0.0
        self.hangs_until = 0.0

    def join_flush(self, agent: Agent, order: FlushOrder, held: Version) -> None:
        """`agent` holds version `held` for this flush. It writes once all writers have joined."""
        ordered_version = Version(order.version.generation, order.version.step)
        flush = self._flushes.setdefault((agent.identity.gang, order.serial), _Flush(ordered_version))
        flush.held_versions[agent.node] = held
        agent.call_later(self._world.durations.flush_s(), self._write, agent, order, flush)

    def _write(self, agent: Agent, order: FlushOrder, flush: _Flush) -> None:
        now = self._world.schedule.now
        writer_of: dict[int, str] = {}
        for source in order.sources:
            writer_of[source.rank] = min(source.node, writer_of.get(source.rank, source.node))
        writers = set(writer_of.values())
        have_agreed = writers <= flush.held_versions.keys()
        if have_agreed:
            newest = max(flush.held_versions[node] for node in writers)
            agent.memory.hold_for_flush(newest)
        if now < self.hangs_until or not have_agreed:
            agent.call_later(0.5, self._write, agent, order, flush)
            return
        own_ranks = [rank for rank, node in writer_of.items() if node == agent.node]
        rebuilt = {source.rank for source in order.sources if wire.is_combined(source)}
        error = "no space left on device" if now < self.fails_until else ""
        if any(newest not in agent.memory.versions_of(rank) for rank in own_ranks if rank not in rebuilt):
            error = error or f"no shard of step {newest.step} stands here"
        if not error:
            flush.written_shards.update(dict.fromkeys(own_ranks, newest))
            flush.version = newest
        agent.flushed_serial, agent.flush_error = order.serial, error
        agent.flushed_version = newest if 0 in own_ranks and not error else None
        agent.memory.flush_finished()
        agent.status_changed()

    def publish(self, gang: str, serial: int, path: str, world_size: int) -> str:
        """The coordinator counts the flush as done.

        Returns an error text if the folder is not whole, else an empty text.
        """
        flush = self._flushes.get((gang, serial))
        if flush is None or len(flush.written_shards) != world_size:
            return f"{path} lacks shards"
        if len(set(flush.written_shards.values())) != 1:
            return f"{path} mixes versions: {flush.written_shards}"
        self._folders[gang, path] = flush.version
        return ""

    def add(self, gang: str, path: str, version: Version) -> None:
        """Another gang has left a folder that `gang` may name."""
        self._folders[gang, path] = version

    def version_of(self, gang: str, path: str) -> Version:
        """The version in a folder.

        Raises:
            KeyError: the folder does not exist.
        """
        return self._folders[gang, path]
