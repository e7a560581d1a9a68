"""What the nodes' daemons keep of requeued gangs (by the real `retention.Retention`), and how it may be lost.

A node's memory goes with its kernel; a restart of its daemon does it no harm. Now and then a shard is damaged: whoever
takes it back verifies it, and does without.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery.restore_plan import wants_no_memory
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import Shard
from muster.daemon.node.kept_memory.retention import RETENTION_S, JobOwner, KeptEntry, Retention

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World

_UID = 1000
_DAMAGED = "damaged"


class Depots:
    """Every node's. `damage`: how often a shard is damaged."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._chance = random.Random(f"depots {seed}")
        self._custodies: dict[str, Retention[tuple[Shard, ...]]] = {}
        self.damage = 0.0

    def _of(self, node: str) -> Retention[tuple[Shard, ...]]:
        return self._custodies.setdefault(node, Retention())

    def leave(self, agent: Agent) -> None:
        """An agent leaves what it has, if its node's daemon takes it."""
        world, node = self._world, agent.node
        shards = agent.memory.own()
        if agent.post.pool or not shards or not world.daemons[node].awake():
            return
        world.laws.left(agent)
        owner, until = JobOwner(agent.post.job, _UID), world.schedule.now + RETENTION_S
        if not self._of(node).refusal(owner):
            self._of(node).keep(KeptEntry(owner, agent.post.gang, until, shards, agent.newest))
        world.schedule.later(RETENTION_S, self.expire, node, until)

    def take(self, agent: Agent) -> None:
        """The agent of the next run takes back what was left on its node."""
        if not self._world.daemons[agent.node].awake():
            return
        kept = self._of(agent.node).hand_out(_UID, agent.post.gang)
        for shard in kept.memory if kept else ():
            damaged = self._chance.random() < self.damage
            agent.memory.take_back(shard.rank, shard.version, _DAMAGED if damaged else shard.digest)

    def tell_over(self, node: str, state: DurableState) -> None:
        """The coordinator answers a heartbeat, which names what is kept."""
        kept = self._of(node).kept
        if kept is not None and wants_no_memory(state.gangs.get(kept.gang), kept.generation):
            self._of(node).remove_obsolete(kept.gang, kept.generation)

    def job_starts(self, node: str, job: int) -> None:
        """A job's prolog."""
        self._of(node).job_starts(JobOwner(job, _UID))
        self._world.laws.prolog_returned(node, job, self._of(node).kept)

    def expire(self, node: str, now: float) -> None:
        """The daemon looks at what it has kept for long enough."""
        self._of(node).remove_expired(now)
        self._world.laws.kept_at(node, now, self._of(node).kept)

    def lose(self, node: str) -> None:
        """The node's kernel is gone."""
        self._custodies.pop(node, None)
