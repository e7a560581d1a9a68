"""Durable storage: folders that the agents of a gang write together. A folder counts once every writer has finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import Version
from muster.v1.agent_pb2 import FlushOrder

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World


@dataclass(slots=True)
class _Round:
    """One flush of a gang: who said what it holds, and which ranks' shards are written."""

    version: Version
    said: dict[str, Version] = field(default_factory=dict)
    written: dict[int, Version] = field(default_factory=dict)


class Flushes:
    """All durable checkpoints. `broken_until`: writing fails before that time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._folders: dict[tuple[str, str], Version] = {}
        self.broken_until = 0.0
        self.mute_until = 0.0

    def say(self, agent: Agent, order: FlushOrder, held: Version) -> None:
        """`agent` holds `held` for this flush; it writes once all writers have spoken."""
        named = Version(order.version.generation, order.version.step)
        round = self._rounds.setdefault((agent.post.gang, order.serial), _Round(named))
        round.said[agent.node] = held
        agent.later(self._world.timing.flush(), self._write, agent, order, round)

    def _write(self, agent: Agent, order: FlushOrder, round: _Round) -> None:
        now = self._world.schedule.now
        writers = {source.node for source in order.sources}
        if now < self.mute_until or not writers <= round.said.keys():
            agent.later(0.5, self._write, agent, order, round)
            return
        mine = [source.rank for source in order.sources if source.node == agent.node]
        newest = max(round.said.values())
        error = "no space left on device" if now < self.broken_until else ""
        if any(newest not in agent.memory.versions(rank) for rank in mine):
            error = error or f"no shard of step {newest.step} stands here"
        if not error:
            round.written.update(dict.fromkeys(mine, newest))
            round.version = newest
        agent.flushed, agent.flush_error = order.serial, error
        agent.memory.let_go()
        agent.changed()

    def published(self, gang: str, serial: int, path: str, world_size: int) -> str:
        """The coordinator counts the flush as done. Empty, or what is wrong with the folder in truth."""
        round = self._rounds.get((gang, serial))
        if round is None or len(round.written) != world_size:
            return f"{path} lacks shards"
        if len(set(round.written.values())) != 1:
            return f"{path} mixes versions: {round.written}"
        self._folders[gang, path] = round.version
        return ""

    def load(self, gang: str, path: str) -> int:
        """The step of a folder.

        Raises:
            KeyError: there is no such folder.
        """
        return self._folders[gang, path].step
