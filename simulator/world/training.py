"""The ranks of one generation as one training: they load their state, join the rendezvous, and step or hang
together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.checkpoint.format.versions import source_rank
from muster.checkpoint.redundancy import wire
from muster.daemon.coordinator.core.state.events import NodeNumber, NodeTraining, Version
from muster.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent, Rank
    from muster.simulator.world.world import World

_RETRY_S = 0.5
"""Seconds between two attempts to load the state or to join the rendezvous."""
_TIMEOUT_S = 15.0
"""Seconds that a rank waits for its state, or for the other ranks."""


class Training:
    """One generation of one gang, from the start of its first rank."""

    def __init__(self, world: World, gang: str, order: pb.Order) -> None:
        self._world = world
        self.gang = gang
        self.generation = order.generation
        self.ranks: dict[int, Rank] = {}
        self.step = 0
        self.batches = 0
        """Batches that the state has read or skipped."""
        self._steps_finished = 0
        self.began = False
        self.over = False
        self.last_step_at = float("-inf")
        self.in_declared_phase = False
        self.phase_changed_at = float("-inf")
        """The time at which the ranks last entered or left a declared phase."""
        self._one_more_step = False
        self._hung_at = float("-inf")
        self._last_idleness = (float("inf"), float("-inf"))
        self._order = order
        self.world_size: int = order.world_size
        self._joined_ranks: set[int] = set()

    def add_rank(self, rank: Rank) -> None:
        """A rank's process was started."""
        self.ranks[rank.rank] = rank
        self._world.observer.rank_started(self.gang, rank)
        rank.agent.call_later(self._world.durations.boot_s(), self._load_state, rank, self._world.schedule.now)

    def _load_state(self, rank: Rank, since: float) -> None:
        """Load the state that the order names."""
        if not rank.is_active:
            return
        restore, world = self._order.restore, self._world
        if restore.durable_path:
            saved = world.durable_storage.version_of(self.gang, restore.durable_path)
            self.step, rank.flip = saved.step, world.flips_written.get((self.gang, rank.rank, saved), 0)
            self.batches = world.batches_read.get((self.gang, saved), saved.step)
            self.batches += max(0, restore.skip_to_step - saved.step)
        elif restore.HasField("version"):
            version = Version(restore.version.generation, restore.version.step)
            wrote = 0 if restore.resharded else source_rank(rank.rank, restore.written_ranks)
            ranks = {source.rank for source in restore.sources} if restore.resharded else {wrote}
            if not all(self._can_be_fetched(rank, needed, version) for needed in ranks):
                self._retry(rank, since, self._load_state, "its state can't be fetched")
                return
            # What replicas share is read from the shard of the first one.
            self.step, rank.flip = version.step, world.flips_written.get((self.gang, wrote, version), 0)
            self.batches = world.batches_read.get((self.gang, version), version.step)
        rank.running = True
        rank.agent.silences.note_sign(rank.rank)
        rank.agent.status_changed()
        self._join_store(rank, since)

    def _can_be_fetched(self, rank: Rank, needed: int, version: Version) -> bool:
        """Whether some node that the order names gives the shard of the rank `needed`. One source has the digest."""
        sources = [source for source in self._order.restore.sources if source.rank == needed]
        if not sources:
            return False
        if all(map(wire.is_combined, sources)):
            return self._can_be_rebuilt(rank, needed, version)
        holders = [self._world.reachable_peer(rank.agent, source.node) for source in sources]
        digests = [source.digest for source in sources if source.digest]
        return any(holder is not None and holder.memory.has(needed, version, digests[0]) for holder in holders)

    def _can_be_rebuilt(self, rank: Rank, lost: int, version: Version) -> bool:
        """Whether all parts that the order names, and all other shards in them, can be fetched."""
        sources = [source for source in self._order.restore.sources if source.rank == lost]
        ranks = wire.combined_ranks(sources[0]) if sources else ()
        holders = [self._world.reachable_peer(rank.agent, source.node) for source in sources]
        parts = [part for holder in holders if holder is not None for part in holder.memory.combined()]
        found = {part.part for part in parts if (part.version, part.ranks) == (version, ranks)}
        others = set(ranks) - {lost}
        return {ranks[part] for part in found} >= others and (
            len(ranks) == 2 or all(self._can_be_fetched(rank, other, version) for other in others)
        )

    def _join_store(self, rank: Rank, since: float) -> None:
        """Join the other ranks at the rendezvous store."""
        if not rank.is_active or self.over:
            return
        world = self._world
        host = world.reachable_peer(rank.agent, self._order.master_addr)
        if host is None or host.store_generation != self.generation or host.store_port != self._order.master_port:
            self._retry(rank, since, self._join_store, "the rendezvous store does not answer")
            return
        self._joined_ranks.add(rank.rank)
        if len(self._joined_ranks) == self._order.world_size:
            self._begin()

    def _begin(self) -> None:
        """All ranks have joined. Wait for every rank that is frozen at this moment."""
        ranks, world = self.ranks.values(), self._world
        if self.began or self.over or any(not rank.alive or rank.kill_sent for rank in ranks):
            return
        if not all(rank.is_active for rank in ranks):
            world.schedule.call_later(_RETRY_S, self._begin)
            return
        self.began = True
        world.observer.generation_joined(self.gang, self.generation, {rank.agent.node for rank in ranks})
        world.schedule.call_later(world.durations.step_s(), self._step)

    def _retry(self, rank: Rank, since: float, action: Callable[[Rank, float], None], reason: str) -> None:
        if self._world.schedule.now - since > _TIMEOUT_S:
            rank.agent.rank_exited(rank, 1, f"RuntimeError: {reason}")
        else:
            rank.agent.call_later(_RETRY_S, action, rank, since)

    def _step(self) -> None:
        if self.over:
            return
        ranks = self.ranks.values()
        if any(not r.alive or r.kill_sent for r in ranks):
            self.over = True
            return
        if broken := [rank for rank in ranks if rank.agent.machine.crashes_ranks_after == self._steps_finished]:
            self.over = True
            for rank in broken:
                rank.agent.rank_exited(rank, 1, "RuntimeError: CUDA error")
            return
        world = self._world
        if not self.in_declared_phase and all(r.is_active for r in ranks) and self._ring_connected():
            active = [rank for rank in ranks if not rank.hung]
            all_stop = all(self._asked_to_stop(r) and not r.agent.ranks_ignore_stop for r in ranks)
            if len(active) == len(ranks) or self._one_more_step:
                self._finish_step(active, all_stop and len(active) == len(ranks))
            if len(active) == len(ranks) and (world.is_finished(self.gang) or all_stop):
                self._exit_all(world.durations.stop_s if all_stop else world.durations.exit_s)
                return
        world.schedule.call_later(world.durations.step_s(), self._step)

    def _asked_to_stop(self, rank: Rank) -> bool:
        return rank.agent.stop_requested or rank.agent.swapped_generation == self.generation

    def _finish_step(self, ranks: list[Rank], last: bool) -> None:
        self._one_more_step = False
        if self._steps_finished:  # ranks that hung one step behind the others have gone on
            self._note_finished([rank for rank in ranks if rank.step < self.step], last=False)
        self.step += 1
        self.batches += 1
        self._read_batch()
        self._steps_finished += 1
        self.last_step_at = self._world.schedule.now
        self._world.step_times.measure(self.step, ranks)
        self._note_finished(ranks, last)

    def _note_finished(self, ranks: list[Rank], last: bool) -> None:
        by_agent: dict[str, tuple[Agent, list[int]]] = {}
        for rank in ranks:
            rank.step, first = self.step, not rank.progressed
            rank.progressed = True
            rank.stopped_step = self.step if last else 0
            by_agent.setdefault(rank.agent.node, (rank.agent, []))[1].append(rank.rank)
            rank.agent.status_changed(0.0 if first or last else 0.25)
        for agent, numbers in by_agent.values():
            agent.training = self._reported_numbers(len(numbers))
            agent.memory.store_step(self.generation, self.step, numbers, last)

    def _reported_numbers(self, ranks: int) -> NodeTraining | None:
        """The loss of a step: it falls and scatters, and is high for bad batches. None: the gang reports none."""
        if (bad := self._world.bad_batches.get(self.gang)) is None:
            return None
        scatter = 0.002 * (self.batches * 7919 % 13)
        loss = 8.0 if self.batches in bad else 2.0 + 1.0 / (self.batches + 5) + scatter
        number = NodeNumber("loss", self.step, ranks, loss, loss, loss, 0, 0)
        return NodeTraining(self.generation, (number,), skips_batches=self.gang in self._world.skipping_gangs)

    def _read_batch(self) -> None:
        """A step has read the next batch."""
        world = self._world
        if self.gang in world.bad_batches:
            world.batches_read[self.gang, Version(self.generation, self.step)] = self.batches
            world.observer.batch_read(self.gang, self.batches)

    @property
    def idle_since(self) -> float:
        """Since when every rank waits for one that hangs; infinite if none hangs, or if the ranks evaluate or save."""
        if self.in_declared_phase or not any(rank.hung for rank in self.ranks.values()):
            return float("inf")
        return max(self._hung_at, self.last_step_at, self.phase_changed_at)

    def idle_s(self, now: float, ended_within_s: float) -> float:
        """For how many seconds every rank waits already, or has waited until a moment ago; 0: none of both."""
        since, until = self.idle_since, now
        if since == float("inf"):
            since, until = self._last_idleness
        return max(0.0, until - since) if now - until <= ended_within_s else 0.0

    def end_hang(self, rank: Rank) -> None:
        """The rank goes on."""
        if rank.hung:
            self._last_idleness = (self.idle_since, self._world.schedule.now)
        rank.hung = False

    def hang_rank(self, rank: Rank, behind: bool) -> None:
        """A rank makes no more steps.

        `behind`: ranks on other nodes finish the current step, and ranks on this node do not.
        """
        self._hung_at = self._world.schedule.now
        for other in self.ranks.values():
            other.hung = other.hung or other is rank or (behind and other.agent is rank.agent)
        self._one_more_step = behind and not all(other.hung for other in self.ranks.values())
        self._world.observer.rank_hung(self.gang, self.generation)

    def silence_rank(self, rank: Rank) -> None:
        """A thread of the rank keeps the GIL: the rank makes no more steps and sends no signs of life."""
        rank.hung, self._hung_at = True, self._world.schedule.now
        rank.agent.silence_rank(rank)
        self._world.observer.rank_hung(self.gang, self.generation)

    def end_silence(self, rank: Rank) -> None:
        """The thread gives the GIL back."""
        self.end_hang(rank)
        rank.silent = False

    def declare_phase(self, seconds: float) -> None:
        """All ranks are in a declared phase for this many seconds."""
        self._set_phase(True)
        self._world.schedule.call_later(seconds, self._set_phase, False)

    def _set_phase(self, in_phase: bool) -> None:
        self.in_declared_phase, self.phase_changed_at = in_phase, self._world.schedule.now
        for rank in self.ranks.values():
            rank.declared_phase = "evaluation" if in_phase else ""
            if rank.alive:
                rank.agent.status_changed(0.25)

    def _ring_connected(self) -> bool:
        """Every two adjacent nodes in the ring reach each other."""
        nodes = list(dict.fromkeys(self.ranks[n].agent.node for n in sorted(self.ranks)))
        connected = self._world.network.connected
        return all(connected(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if a != b)

    def _exit_all(self, duration_s: Callable[[], float]) -> None:
        """Every rank exits with 0, after `duration_s()` seconds."""
        self.over = True
        for rank in self.ranks.values():
            if rank.is_active:
                self._world.schedule.call_later(duration_s(), rank.agent.rank_exited, rank, 0, "")

    def reset_connections(self, dead: str, probability: float, within_s: float = 1.0, first: str = "") -> None:
        """The kernel of `dead` has reset its connections.

        Each healthy rank crashes with this probability within `within_s` seconds. Ranks on the node `first` crash at
        once.
        """
        for rank in self.ranks.values():
            if rank.agent.node == first != dead:
                self._world.schedule.call_later(0.0, self._crash_from_reset, rank)
            elif rank.agent.node != dead and rank.is_active and self._world.rng.random() < probability:
                self._world.schedule.call_later(within_s * self._world.rng.random(), self._crash_from_reset, rank)

    def _crash_from_reset(self, rank: Rank) -> None:
        if rank.is_active:
            rank.died_of_reset = True
            rank.agent.rank_exited(rank, 1, "RuntimeError: Connection reset by peer")
