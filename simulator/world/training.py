"""The ranks of one generation as one training: they load, meet at the store, step and hang together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import Version
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent, Rank
    from muster.simulator.world.world import World

_AGAIN_S = 0.5
_PATIENCE_S = 15.0
"""How long a rank waits for its state, or for the others."""


class Training:
    """One generation of one gang, from the first rank's start on."""

    def __init__(self, world: World, gang: str, order: pb.Order) -> None:
        self._world = world
        self.gang = gang
        self.generation = order.generation
        self.ranks: dict[int, Rank] = {}
        self.step = 0
        self.began = False
        self.over = False
        self.last_step_at = float("-inf")
        self.rests = False
        self.rest_at = float("-inf")
        """When its ranks last entered a declared phase, or left it."""
        self._one_more = False
        self._order = order
        self._joined: set[int] = set()

    def enter(self, rank: Rank) -> None:
        """A rank's process was started."""
        self.ranks[rank.rank] = rank
        self._world.laws.started(self.gang, rank)
        rank.agent.later(self._world.timing.boot(), self._load, rank, self._world.schedule.now)

    def _load(self, rank: Rank, since: float) -> None:
        """Take the state that the order names."""
        if not rank.able:
            return
        restore, world = self._order.restore, self._world
        if restore.durable_path:
            self.step = world.flushes.load(self.gang, restore.durable_path)
        elif restore.HasField("version"):
            version = Version(restore.version.generation, restore.version.step)
            source = next((s for s in restore.sources if s.rank == rank.rank), None)
            holder = world.peer(rank.agent, source.node) if source else None
            if holder is None or source is None or not holder.memory.has(rank.rank, version, source.digest):
                self._wait(rank, since, self._load, "its state can't be fetched")
                return
            self.step = version.step
        rank.running = True
        rank.agent.changed()
        self._join(rank, since)

    def _join(self, rank: Rank, since: float) -> None:
        """Meet the others at the store."""
        if not rank.able or self.over:
            return
        world = self._world
        host = world.peer(rank.agent, self._order.master_addr)
        if host is None or host.store != self.generation or host.store_port != self._order.master_port:
            self._wait(rank, since, self._join, "the rendezvous store does not answer")
            return
        self._joined.add(rank.rank)
        if len(self._joined) == self._order.world_size:
            self._meet()

    def _meet(self) -> None:
        """All have joined; who is frozen at this moment is waited for."""
        ranks, world = self.ranks.values(), self._world
        if self.began or self.over or any(not rank.alive or rank.doomed for rank in ranks):
            return
        if not all(rank.able for rank in ranks):
            world.schedule.later(_AGAIN_S, self._meet)
            return
        self.began = True
        world.laws.joined(self.gang, self.generation, {rank.agent.node for rank in ranks})
        world.schedule.later(world.timing.step(), self._step)

    def _wait(self, rank: Rank, since: float, action: Callable[[Rank, float], None], words: str) -> None:
        if self._world.schedule.now - since > _PATIENCE_S:
            rank.agent.rank_ends(rank, 1, f"RuntimeError: {words}")
        else:
            rank.agent.later(_AGAIN_S, action, rank, since)

    def _step(self) -> None:
        if self.over:
            return
        ranks = self.ranks.values()
        if any(not r.alive or r.doomed for r in ranks):
            self.over = True
            return
        world = self._world
        if not self.rests and all(r.able for r in ranks) and self._ring_holds():
            going = [rank for rank in ranks if not rank.hung]
            if len(going) == len(ranks) or self._one_more:
                self._finish_step(going)
            stops = all(r.agent.asked_to_stop and not r.agent.deaf_ranks for r in ranks)
            if len(going) == len(ranks) and (world.finished(self.gang) or stops):
                self.exit_all(0)
                return
        world.schedule.later(world.timing.step(), self._step)

    def _finish_step(self, ranks: list[Rank]) -> None:
        self._one_more = False
        self.step += 1
        self.last_step_at = self._world.schedule.now
        by_agent: dict[str, tuple[Agent, list[int]]] = {}
        for rank in ranks:
            rank.step, first = self.step, not rank.progressed
            rank.progressed = True
            by_agent.setdefault(rank.agent.node, (rank.agent, []))[1].append(rank.rank)
            rank.agent.changed(0.0 if first else 0.25)
        for agent, numbers in by_agent.values():
            agent.memory.keep(self.generation, self.step, numbers)

    def hang(self, rank: Rank, behind: bool) -> None:
        """A rank goes on no more. `behind`: the other nodes finish the step under way, its own does not."""
        for other in self.ranks.values():
            other.hung = other.hung or other is rank or (behind and other.agent is rank.agent)
        self._one_more = behind and not all(other.hung for other in self.ranks.values())
        self._world.laws.hung_by_itself(self.gang, self.generation)

    def rest(self, seconds: float) -> None:
        """All ranks are in a declared phase for so long."""
        self._rest(True)
        self._world.schedule.later(seconds, self._rest, False)

    def _rest(self, rests: bool) -> None:
        self.rests, self.rest_at = rests, self._world.schedule.now
        for rank in self.ranks.values():
            rank.declared = "evaluation" if rests else ""
            if rank.alive:
                rank.agent.changed(0.25)

    def _ring_holds(self) -> bool:
        """Neighbours in the ring of ranks reach each other."""
        nodes = list(dict.fromkeys(self.ranks[n].agent.node for n in sorted(self.ranks)))
        both = self._world.network.both
        return all(both(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if a != b)

    def exit_all(self, code: int) -> None:
        """Every rank ends by itself."""
        self.over = True
        for rank in self.ranks.values():
            if rank.able:
                delay = 0.3 * self._world.chance.random()
                self._world.schedule.later(delay, rank.agent.rank_ends, rank, code, "")

    def feel_reset(self, dead: str, chance: float, within_s: float = 1.0, first: str = "") -> None:
        """The kernel of `dead` has reset its peers' connections: healthy ranks die of it, or hang. Those on the node
        `first` die at once."""
        for rank in self.ranks.values():
            if rank.agent.node == first != dead:
                self._world.schedule.later(0.0, self._die_of_reset, rank)
            elif rank.agent.node != dead and rank.able and self._world.chance.random() < chance:
                self._world.schedule.later(within_s * self._world.chance.random(), self._die_of_reset, rank)

    def _die_of_reset(self, rank: Rank) -> None:
        if rank.able:
            rank.reset = True
            rank.agent.rank_ends(rank, 1, "RuntimeError: Connection reset by peer")
