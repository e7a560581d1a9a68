"""The memory that node daemons keep for requeued gangs, by the real Retention rules, and how it may be lost.

A node's memory is lost with its kernel and survives a restart of the node daemon. A shard may be damaged: the agent
that takes it back verifies it and drops it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.recovery.restore_plan import memory_is_obsolete
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import Shard
from muster.daemon.node.kept_memory.retention import RETENTION_S, JobOwner, KeptEntry, Retention

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World

_UID = 1000
_DAMAGED = "damaged"


class KeptMemoryStores:
    """The kept memory of every node. `damage_rate`: the probability that a shard is damaged."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"depots {seed}")
        self._retentions: dict[str, Retention[tuple[Shard, ...]]] = {}
        self.damage_rate = 0.0

    def _retention_of(self, node: str) -> Retention[tuple[Shard, ...]]:
        return self._retentions.setdefault(node, Retention())

    def keep(self, agent: Agent) -> None:
        """An agent hands over its shards, if its node daemon accepts them."""
        world, node = self._world, agent.node
        shards = agent.memory.own_shards()
        if agent.identity.pool_request or not shards or not world.daemons[node].is_running():
            return
        world.observer.shards_handed_over(agent)
        owner, until = JobOwner(agent.identity.job, _UID), world.schedule.now + RETENTION_S
        if not self._retention_of(node).refusal(owner):
            self._retention_of(node).keep(KeptEntry(owner, agent.identity.gang, until, shards, agent.newest_generation))
        world.schedule.call_later(RETENTION_S, self.expire, node, until)

    def give_back(self, agent: Agent) -> None:
        """The agent of the next run takes back what its node has kept."""
        if not self._world.daemons[agent.node].is_running():
            return
        kept = self._retention_of(agent.node).hand_out(_UID, agent.identity.gang)
        for shard in kept.memory if kept else ():
            damaged = self._rng.random() < self.damage_rate
            agent.memory.restore_kept(shard.rank, shard.version, _DAMAGED if damaged else shard.digest)

    def drop_unwanted(self, node: str, state: DurableState) -> None:
        """The coordinator answers a heartbeat that names the kept memory: drop the memory if no run needs it."""
        kept = self._retention_of(node).kept
        if kept is not None and memory_is_obsolete(state.gangs.get(kept.gang), kept.generation):
            self._retention_of(node).remove_obsolete(kept.gang, kept.generation)

    def job_starts(self, node: str, job: int) -> None:
        """Slurm's prolog runs for a job."""
        self._retention_of(node).job_starts(JobOwner(job, _UID))
        self._world.observer.prolog_finished(node, job, self._retention_of(node).kept)

    def expire(self, node: str, now: float) -> None:
        """The node daemon drops what it has kept for long enough."""
        self._retention_of(node).remove_expired(now)
        self._world.observer.kept_memory_checked(node, now, self._retention_of(node).kept)

    def node_lost(self, node: str) -> None:
        """The node's kernel is gone, and its memory with it."""
        self._retentions.pop(node, None)
