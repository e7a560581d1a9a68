"""The shards that one agent holds, and its part in committing versions. The real CommitTracker counts.

A shard is what its rank wrote. Its digest names rank, generation and step, so that a mixture of versions is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from muster.checkpoint.format import versions
from muster.checkpoint.format.replica_agreement import ReplicaAgreement, ReplicaDigest, ReplicaDigests
from muster.checkpoint.redundancy.scheme import NodePlaces, Place
from muster.checkpoint.redundancy.wire import places_of_order
from muster.checkpoint.store.commit.commit_tracker import CommitDecision, CommitTracker
from muster.daemon.coordinator.core.state.events import CombinedShards, ReplicaDisagreement, Shard, Version
from muster.simulator.environment.network import Fate
from muster.simulator.world.snapshot_crashes import SnapshotPoint
from muster.v1.agent_pb2 import DUTY_RUN, FlushOrder, Order

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent

_SHARD_BYTES = 2**20
"""Bytes of a shard: few enough that a second rank moves wherever that saves communication."""
_GROUP = 1
"""The replica group of all ranks."""
_RETRY_S = 0.5
"""Seconds between two attempts to reach a peer."""


def digest(rank: int, version: Version) -> str:
    """The digest of what `rank` wrote at `version`."""
    return f"{rank}-{version.generation}-{version.step}"


class ShardMemory:
    """The shards of one node, by rank, by whether the node is their own, and by version; and what the gang has
    committed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._digests: dict[tuple[int, bool, Version], str] = {}
        self._shards_cache: tuple[Shard, ...] | None = ()
        self._parts: dict[tuple[Version, tuple[int, ...], int], dict[int, str]] = {}
        """The digests of what each part combines, by version, ranks and part."""
        self._places = NodePlaces()
        self._tracker = CommitTracker(0, frozenset())
        self.disagreement: ReplicaDisagreement | None = None
        self._order = Order()
        self._next_step = 0
        self._last_vote_step = 0
        self._pinned: Version | None = None
        self._void = Version(0, 0)
        self._may_write_newer = False
        self.committed: Version | None = None

    # -- what stands --

    def shards(self) -> tuple[Shard, ...]:
        """All complete shards of this node."""
        if self._shards_cache is None:
            sharded = self._is_sharded
            self._shards_cache = tuple(
                Shard(rank, v, own, text, *self._replica(rank, v), _SHARD_BYTES, sharded)
                for (rank, own, v), text in self._digests.items()
            )
        return self._shards_cache

    @property
    def _is_sharded(self) -> bool:
        return self._agent.identity.gang in self._agent.world.sharded_gangs

    def _replica(self, rank: int, version: Version) -> ReplicaDigest:
        """What is compared with other ranks. Parts of one state are not."""
        return ReplicaDigest() if self._is_sharded else ReplicaDigest(_GROUP, self._flip(rank, version))

    def _flip(self, rank: int, version: Version) -> int:
        """The bit flip in what the rank wrote, which stands for its digest."""
        return self._agent.world.flips_written.get((self._agent.identity.gang, rank, version), 0)

    def has(self, rank: int, version: Version, text: str) -> bool:
        """A shard with this digest is here."""
        return any(self._digests.get((rank, own, version)) == text for own in (True, False))

    def combined(self) -> tuple[CombinedShards, ...]:
        """All whole parts of this node that combine shards."""
        return tuple(
            CombinedShards(
                ranks,
                version,
                part,
                tuple(combined.get(rank, "") for rank in ranks),
                tuple(_SHARD_BYTES if rank in combined else 0 for rank in ranks),
            )
            for (version, ranks, part), combined in self._parts.items()
            if len(combined) == len(ranks) - 1
        )

    def take(self, place: Place, rank: int, version: Version) -> None:
        """A rank's shard has come to one of its places, which is here."""
        if place.ranks:
            self._parts.setdefault((version, place.ranks, place.part), {})[rank] = digest(rank, version)
        else:
            self.add(rank, False, version)

    def has_taken(self, place: Place, rank: int, version: Version) -> bool:
        """Whether a rank's shard is in one of its places, which is here."""
        if not place.ranks:
            return version in self.versions_of(rank)
        return rank in self._parts.get((version, place.ranks, place.part), {})

    def versions_of(self, rank: int) -> list[Version]:
        """The versions of `rank` that are here."""
        return sorted({v for r, _, v in self._digests if r == rank})

    def own_shards(self) -> tuple[Shard, ...]:
        """The shards of this node's own ranks, of the two newest versions."""
        own = [shard for shard in self.shards() if shard.primary]
        newest = sorted({shard.version for shard in own})[-2:]
        return tuple(shard for shard in own if shard.version in newest)

    def restore_kept(self, rank: int, version: Version, text: str) -> None:
        """Take in a shard of the earlier run if its digest is right."""
        if text == digest(rank, version):
            self.add(rank, True, version)

    def add(self, rank: int, own: bool, version: Version) -> None:
        """A shard is complete here."""
        self._digests[rank, own, version] = digest(rank, version)
        self._shards_cache = None

    def _drop_older(self, older_than: Version) -> None:
        for key in [k for k in self._digests if k[2] < older_than and not self._is_held(k[2])]:
            del self._digests[key]
            self._shards_cache = None
        for part in [k for k in self._parts if k[0] < older_than and not self._is_held(k[0])]:
            del self._parts[part]

    def _is_held(self, version: Version) -> bool:
        """Real agents commit one more version at most until they know which one a flush writes. Here commits go on, so
        that all are kept which it may be."""
        if self._pinned is None:
            return False
        return version == self._pinned or (self._may_write_newer and version > self._pinned)

    # -- a generation --

    def apply_order(self, order: Order) -> None:
        """Take over an order."""
        if order.duty == DUTY_RUN and order.generation == self._tracker.generation:
            self._tracker.agreement.enabled = not order.replicas_differ
        if order.duty != DUTY_RUN or order.generation <= max(self._order.generation, self._agent.fenced_generation):
            return
        self._order, self._places = order, places_of_order(order, self._agent.node)
        nodes = frozenset(place.node for place in order.places)
        self._tracker = CommitTracker(
            order.generation, nodes, ReplicaAgreement(set(order.agreed_groups), not order.replicas_differ)
        )
        self.disagreement = None
        self._next_step = self._last_vote_step = 0

    def store_step(self, generation: int, step: int, ranks: list[int], last: bool = False) -> None:
        """The ranks of this node have finished a step. Store it if it is the step that all nodes store, or the last one
        before a planned stop: for that step a rank waits until a slot is free."""
        agent = self._agent
        if not agent.is_running() or generation != self._order.generation or generation <= agent.fenced_generation:
            return
        version = Version(generation, step)
        if last or step == self._next_step or not (self._next_step or self._last_vote_step):
            self._last_vote_step = step
            for rank in ranks:
                agent.world.flips_written[agent.identity.gang, rank, version] = agent.ranks[rank].flip
                self.add(rank, True, version)
            if agent.world.snapshot_crashes.is_killed(agent, SnapshotPoint.FILLED):
                return
            agent.call_later(agent.world.durations.copy_s(), self._replicate, version, ranks)
            agent.status_changed(0.25)
        elif step > self._next_step > self._last_vote_step:
            self._last_vote_step = self._next_step
            self._report_to_leader(Version(generation, self._next_step), True)

    def _replicate(self, version: Version, ranks: list[int]) -> None:
        """Offer the shards to all their places, until they are there."""
        if self.is_stale(version):
            return
        holders = [place.holder for rank in ranks for place in self._places.sent(rank)]
        self._offer(version, ranks, list(dict.fromkeys(holders)))

    def _offer(self, version: Version, ranks: list[int], holders: list[str]) -> None:
        """Offer the shards to one node after the other."""
        if self.is_stale(version):
            return
        if not holders:
            self._stored(version)
            return

        def store_copies(other: Agent) -> bool:
            if other.memory.is_stale(version):
                return False
            for rank in ranks:
                for place in self._places.sent(rank):
                    if place.holder == other.node:
                        other.memory.take(place, rank, version)
            other.status_changed(0.25)
            self._agent.world.snapshot_crashes.is_killed(self._agent, SnapshotPoint.COPIED)
            return True

        self._call(
            holders[0],
            store_copies,
            partial(self._offer, version, ranks, holders),
            partial(self._offer, version, ranks, holders[1:]),
        )

    def _stored(self, version: Version) -> None:
        if not self._agent.world.snapshot_crashes.is_killed(self._agent, SnapshotPoint.STORED):
            self._report_to_leader(version, False)

    def is_stale(self, version: Version) -> bool:
        """Whether this agent takes no copy of a version any more (`CommitProtocol.stale_reason`)."""
        old = self.committed is not None and version < self.committed
        return version.generation <= self._agent.fenced_generation or old or self._is_void(version, self._void)

    def _report_to_leader(self, version: Version, skipped: bool) -> None:
        """Report to the commit leader until it accepts the report."""
        agent = self._agent
        if version.generation <= agent.fenced_generation or version.generation != self._order.generation:
            return
        own = [place.rank for place in self._order.places if place.node == agent.node]
        replicas = {rank: self._replica(rank, version) for rank in own if not self._is_sharded}
        self._call(
            self._order.places[0].node,
            lambda leader: leader.memory.count_vote(agent.node, version, skipped, replicas),
            partial(self._report_to_leader, version, skipped),
        )

    def _call(
        self,
        node: str,
        call: Callable[[Agent], bool],
        again: Callable[[], None],
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        """Call another agent, as the network lets it.

        Args:
            call: what the other agent does; returns whether it accepts the call.
            again: called after a while if there is no answer, or a refusal.
            answered: called if the other agent accepts.
        """
        agent = self._agent
        fate = agent.world.peer_calls.draw() if node != agent.node else Fate()

        def arrive(retries: bool) -> None:
            other = agent.world.reachable_peer(agent, node)
            accepted = other is not None and fate.arrives and call(other)
            if not retries:
                return
            if not accepted or not fate.answered:
                agent.call_later(_RETRY_S, again)
            elif agent.is_running():
                answered()
            else:
                agent.call_later(0.0, answered)

        if fate.again_s:
            agent.world.schedule.call_later(fate.late_s + fate.again_s, arrive, False)
        if fate.late_s:
            agent.world.schedule.call_later(fate.late_s, arrive, True)
        else:
            arrive(True)

    # -- the leader --

    def count_vote(self, node: str, version: Version, skipped: bool, replicas: ReplicaDigests) -> bool:
        """A node has two copies of a version, or has skipped it.

        Returns False if this leader does not accept the vote.
        """
        agent = self._agent
        if version.generation != self._tracker.generation or version.generation <= agent.fenced_generation:
            return False
        newest_step = max((r.step for r in agent.ranks.values()), default=0)
        voted = versions.Version(version.generation, version.step)
        if skipped:
            decision = self._tracker.record_skipped(node, voted, newest_step)
        else:
            decision = self._tracker.record_stored(node, voted, newest_step, replicas)
        crashes = agent.world.snapshot_crashes
        if decision is None:
            return not crashes.is_killed(agent, SnapshotPoint.REPORTED)
        self._note_disagreement(version, decision)
        if not decision.void:
            agent.world.observer.version_committed(agent, self._order, version)
        if crashes.is_killed(agent, SnapshotPoint.DECIDED):
            return False
        for member in self._order.members:
            agent.call_later(agent.world.network.message_delay_s(), self._send_decision, member.node, decision)
        return True

    def _note_disagreement(self, version: Version, decision: CommitDecision) -> None:
        found = decision.disagreement
        if found is not None and self.disagreement is None:
            self.disagreement = ReplicaDisagreement(version, found.ranks, found.majority, found.replicas)
            self._agent.status_changed()

    def _send_decision(self, node: str, decision: CommitDecision) -> None:
        agent = self._agent
        if decision.version.generation <= agent.fenced_generation or self._tracker.next_step > decision.next_step:
            return
        self._call(
            node, lambda other: other.memory.receive_decision(decision), partial(self._send_decision, node, decision)
        )

    def receive_decision(self, decision: CommitDecision) -> bool:
        """A version is committed or void. Returns that this was heard."""
        agent = self._agent
        version = Version(*decision.version)
        if version.generation <= agent.fenced_generation:
            return True
        if version.generation == self._order.generation:
            self._next_step = max(self._next_step, decision.next_step)
        committed = Version(*decision.committed)
        if committed > (self.committed or Version(0, 0)):
            self.committed = committed
            self._drop_older(committed)
        if decision.void:
            self._void = max(self._void, version)
            for key in [k for k in self._digests if self._is_void(k[2], version)]:
                del self._digests[key]
            for part in [k for k in self._parts if self._is_void(k[0], version)]:
                del self._parts[part]
        self._shards_cache = None
        agent.status_changed(0.0 if any(rank.stopped_step for rank in agent.ranks.values()) else 0.25)
        return not agent.world.snapshot_crashes.is_killed(agent, SnapshotPoint.TOLD)

    def _is_void(self, kept: Version, void: Version) -> bool:
        newer = self.committed is None or kept > self.committed
        return newer and kept.generation == void.generation and kept <= void

    # -- flushes --

    def start_flush(self, order: FlushOrder) -> None:
        """Write this node's part of a flush: hold the committed version, agree on the newest one, write it."""
        agent = self._agent
        ordered_version = Version(order.version.generation, order.version.step)
        held = max(ordered_version, self.committed) if self.committed is not None else ordered_version
        self._pinned, self._may_write_newer = held, True
        agent.world.durable_storage.join_flush(agent, order, held)

    def hold_for_flush(self, version: Version) -> None:
        """The agents have agreed on the version that the flush writes."""
        if self._pinned is not None and self._may_write_newer:
            self._pinned, self._may_write_newer = version, False
            if self.committed is not None:
                self._drop_older(self.committed)

    def flush_finished(self) -> None:
        """The flush is over."""
        self._pinned = None
        if self.committed is not None:
            self._drop_older(self.committed)
