"""The shards that one agent keeps, and its part in committing versions (the real `CommitTracker` counts).

A shard is what its rank wrote: its digest names rank, generation and step, so a mixture shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.checkpoint.format import versions
from muster.checkpoint.store.commit.commit_tracker import CommitDecision, CommitTracker
from muster.daemon.coordinator.core.state.events import Shard, Version
from muster.v1.agent_pb2 import DUTY_RUN, FlushOrder, Order

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent

_AGAIN_S = 0.5


def digest(rank: int, version: Version) -> str:
    """The digest of what `rank` wrote at `version`."""
    return f"{rank}-{version.generation}-{version.step}"


class Memory:
    """Shards by (rank, own, version), and what has been agreed on."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._kept: dict[tuple[int, bool, Version], str] = {}
        self._shown: tuple[Shard, ...] | None = ()
        self._tracker = CommitTracker(0, frozenset())
        self._order = Order()
        self._next_step = 0
        self._answered = 0
        self._pinned: Version | None = None
        self.committed: Version | None = None

    # -- what stands --

    def shards(self) -> tuple[Shard, ...]:
        """All that stands whole here."""
        if self._shown is None:
            self._shown = tuple(Shard(rank, v, own, text) for (rank, own, v), text in self._kept.items())
        return self._shown

    def has(self, rank: int, version: Version, text: str) -> bool:
        """A shard of that digest stands here."""
        return any(self._kept.get((rank, own, version)) == text for own in (True, False))

    def versions(self, rank: int) -> list[Version]:
        """The versions of `rank` that stand here."""
        return sorted({v for r, _, v in self._kept if r == rank})

    def own(self) -> tuple[Shard, ...]:
        """What stands in this node's own slots, of the two newest versions."""
        own = [shard for shard in self.shards() if shard.own]
        newest = sorted({shard.version for shard in own})[-2:]
        return tuple(shard for shard in own if shard.version in newest)

    def take_back(self, rank: int, version: Version, text: str) -> None:
        """Take in a shard of the run before, if it is what the rank wrote."""
        if text == digest(rank, version):
            self.put(rank, True, version)

    def put(self, rank: int, own: bool, version: Version) -> None:
        """A shard has come to stand here."""
        self._kept[rank, own, version] = digest(rank, version)
        self._shown = None

    def _drop(self, older_than: Version) -> None:
        for key in [k for k in self._kept if k[2] < older_than and k[2] != self._pinned]:
            del self._kept[key]
            self._shown = None

    # -- a generation --

    def enlist(self, order: Order) -> None:
        """Take note of an order."""
        if order.duty != DUTY_RUN or order.generation <= max(self._order.generation, self._agent.fenced):
            return
        self._order = order
        nodes = frozenset(place.node for place in order.places)
        self._tracker = CommitTracker(order.generation, nodes)
        self._next_step = self._answered = 0

    def keep(self, generation: int, step: int, ranks: list[int]) -> None:
        """The ranks of this node have finished a step: keep it, if it is one that all keep."""
        agent = self._agent
        if not agent.awake() or generation != self._order.generation or generation <= agent.fenced:
            return
        version = Version(generation, step)
        if step == self._next_step or not (self._next_step or self._answered):
            self._answered = step
            for rank in ranks:
                self.put(rank, True, version)
            agent.later(agent.world.timing.copy(), self._copy, version, ranks)
            agent.changed(0.25)
        elif step > self._next_step > self._answered:
            self._answered = self._next_step
            self._report(Version(generation, self._next_step), True)

    def _copy(self, version: Version, ranks: list[int]) -> None:
        if version.generation <= self._agent.fenced:
            return
        buddy = next((m.buddy for m in self._order.members if m.node == self._agent.node), "")
        if buddy:
            other = self._agent.world.peer(self._agent, buddy)
            if other is None or version.generation <= other.fenced:
                self._agent.later(_AGAIN_S, self._copy, version, ranks)
                return
            for rank in ranks:
                other.memory.put(rank, False, version)
            other.changed(0.25)
        self._report(version, False)

    def _report(self, version: Version, skipped: bool) -> None:
        """Tell the leader, until it has heard."""
        agent = self._agent
        if version.generation <= agent.fenced or version.generation != self._order.generation:
            return
        leader = agent.world.peer(agent, self._order.places[0].node)
        if leader is None or not leader.memory.count(agent.node, version, skipped):
            agent.later(_AGAIN_S, self._report, version, skipped)

    # -- the leader --

    def count(self, node: str, version: Version, skipped: bool) -> bool:
        """A node stands twice at a version, or never will. False: that is not taken."""
        agent = self._agent
        if version.generation != self._tracker.generation or version.generation <= agent.fenced:
            return False
        now = max((r.step for r in agent.ranks.values()), default=0)
        vote = self._tracker.record_skipped if skipped else self._tracker.record_stored
        decision = vote(node, versions.Version(version.generation, version.step), now)
        if decision is not None:
            if not decision.void:
                agent.world.laws.committed(agent, self._order, version)
            for member in self._order.members:
                agent.later(agent.world.network.delay(), self._notify, member.node, decision)
        return True

    def _notify(self, node: str, decision: CommitDecision) -> None:
        agent = self._agent
        if decision.version.generation <= agent.fenced or self._tracker.next_step > decision.next_step:
            return
        other = agent.world.peer(agent, node)
        if other is None:
            agent.later(_AGAIN_S, self._notify, node, decision)
        else:
            other.memory.hear(decision)

    def hear(self, decision: CommitDecision) -> None:
        """A version is committed, or void."""
        agent = self._agent
        version = Version(*decision.version)
        if version.generation <= agent.fenced:
            return
        if version.generation == self._order.generation:
            self._next_step = max(self._next_step, decision.next_step)
        committed = Version(*decision.committed)
        if committed > (self.committed or Version(0, 0)):
            self.committed = committed
            self._drop(committed)
        if decision.void:
            for key in [k for k in self._kept if self._is_void(k[2], version)]:
                del self._kept[key]
        self._shown = None
        agent.changed(0.25)

    def _is_void(self, kept: Version, void: Version) -> bool:
        newer = self.committed is None or kept > self.committed
        return newer and kept.generation == void.generation and kept <= void

    # -- flushes --

    def flush(self, order: FlushOrder) -> None:
        """Write this node's part of a flush: hold what is committed, agree on the newest, write it."""
        agent = self._agent
        named = Version(order.version.generation, order.version.step)
        held = max(named, self.committed) if self.committed is not None else named
        self._pinned = held
        agent.world.flushes.say(agent, order, held)

    def let_go(self) -> None:
        """The flush is over."""
        self._pinned = None
        if self.committed is not None:
            self._drop(self.committed)
