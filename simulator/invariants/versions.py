"""Invariant 2: no committed step is lost while its shards exist, and no restored state mixes versions. And 15: a gang
that goes back because of its loss starts from a state of before, and reads no batch again at which the loss was high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from muster.checkpoint.redundancy.scheme import Place
from muster.checkpoint.redundancy.wire import places_of_order
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.daemon.coordinator.core.state.gang import Gang
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.invariants.ground_truth import Reachability
from muster.simulator.world.agent_memory import digest
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent
    from muster.simulator.world.world import World
    from muster.v1 import agent_pb2 as pb

STABLE_CONTACT_S = 6.0
"""Seconds. A node that was reachable for this long is in contact with the coordinator."""


class VersionInvariant:
    """By gang: the newest committed version, and the newest version in durable storage."""

    def __init__(self, world: World, reachability: Reachability) -> None:
        self._world = world
        self._reachability = reachability
        self._committed: dict[str, Version] = {}
        self._durable: dict[str, Version] = {}
        self._void: dict[str, int] = {}
        """The newest generation that was rolled back. Its ranks may commit until they have ended."""

    # -- what there is --

    def is_binding(self, leader: Agent) -> bool:
        """This leader's commit counts. A commit among nodes that are out of the gang does not."""
        gang = leader.identity.gang
        known = self._world.gang(gang)
        if known is not None and leader.node in known.roster.members and known.roster.members[leader.node].removed:
            return False
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        # If a newer run of the job has begun, the memory of the leader's run is freed node by node.
        return all(agent.identity.restarts <= leader.identity.restarts for agent in agents)

    def version_committed(self, gang: str, order: pb.Order, version: Version) -> None:
        """A leader with this order commits a version."""
        nodes = {seat.node for seat in order.places}
        for node in nodes:
            places = places_of_order(order, node)
            for rank in (seat.rank for seat in order.places if seat.node == node):
                self._check_places(gang, version, rank, places.sent(rank), required=min(2, len(nodes)) - 1)
        self._note_committed(gang, version)

    def _note_committed(self, gang: str, version: Version) -> None:
        if version.generation > self._void.get(gang, 0):
            self._committed[gang] = max(version, self._committed.get(gang, version))

    def _check_places(self, gang: str, version: Version, rank: int, places: Sequence[Place], required: int) -> None:
        """The shard is in all of its places, unless the agent that held it has ended."""
        require(
            len(places) >= required,
            f"invariant 2: {version} is committed, but rank {rank} has {len(places)} places beside its node",
        )
        for place in places:
            agent = self._world.agents.get((gang, place.holder))
            require(
                agent is None or not agent.alive or agent.memory.has_taken(place, rank, version),
                f"invariant 2: {version} is committed, and {place.holder} lacks the shard of rank {rank}",
            )

    def generation_fenced(self, gang: Gang, fact: facts.GenerationFenced) -> None:
        """If every rank has stopped for a planned swap, the step that they have kept counts as committed, unless its
        replicas disagree: no leader would commit it."""
        training = self._world.newest_training(gang.id)
        if gang.plans.swap is None or training is None or training.generation != fact.generation:
            return
        if all(rank.exit_code == 0 or rank.stopped_step for rank in training.ranks.values()):
            kept = Version(fact.generation, training.step)
            if self._world.replicas_agree(gang.id, kept, training.world_size):
                self._note_committed(gang.id, kept)

    def check_flush(self, gang: Gang, fact: facts.FlushEnded) -> None:
        """The coordinator counts a flush as done."""
        ranks = gang.ranks_of(gang.checkpoint.flush.version) if gang.checkpoint.flush else 0
        error = self._world.durable_storage.publish(gang.id, fact.serial, fact.path, ranks)
        require(not error, f"invariant 2: {gang.id}: {error}")
        if gang.checkpoint.durable_version is not None:
            self._durable[gang.id] = max(
                gang.checkpoint.durable_version, self._durable.get(gang.id, gang.checkpoint.durable_version)
            )

    def rolled_back(self, fact: facts.RolledBack) -> None:
        """What is newer is wanted no more."""
        self._committed.pop(fact.gang, None)
        self._durable[fact.gang], self._void[fact.gang] = fact.version, fact.generation

    def run_ended(self, gang: str) -> None:
        """A run of the gang's job is over, and its agents' memory is gone."""
        self._committed.pop(gang, None)

    # -- what is made of it --

    def check_sources(self, gang: Gang, fact: facts.GenerationStarted) -> None:
        """Every rank of a generation starts with the state that it wrote itself, or from the shards of all ranks that
        wrote one, and all ranks start at one step."""
        for source in fact.sources:
            expected_digest = digest(source.rank, fact.version) if fact.version else ""
            require(source.digest == expected_digest, f"invariant 2: {fact.version} would be restored from {source}")
        if fact.version is not None:
            ranks = len(fact.seats) * gang.spec.ranks_per_node
            needed = self._ranks_needed(gang, fact.version, ranks)
            named = [source.rank for source in fact.sources]
            require(
                named == list(range(needed)) and fact.resharded == self._is_resharded(gang, fact.version, ranks),
                f"invariant 2: {ranks} ranks need {needed} shards of {fact.version}, and are told to read {named}",
            )

    def _is_resharded(self, gang: Gang, version: Version, ranks: int) -> bool:
        """No rank of so many has a shard of its own: another number of ranks wrote the state in other parts."""
        return ranks != self._world.written_ranks(gang.id, version) and gang.id in self._world.sharded_gangs

    def _ranks_needed(self, gang: Gang, version: Version, ranks: int) -> int:
        """How many ranks' shards a generation of `ranks` ranks needs. A further one shares the state of another."""
        written = self._world.written_ranks(gang.id, version)
        return written if self._is_resharded(gang, version, ranks) else min(ranks, written)

    def check_restored_version(self, gang: Gang, fact: facts.GenerationStarted) -> None:
        """A generation starts with the newest version that exists."""
        committed = self._committed.get(fact.gang)
        newest_available = self._durable.get(fact.gang, _of_earlier_run(gang))
        ranks = len(fact.seats) * gang.spec.ranks_per_node
        if committed is not None and self._is_available(
            gang,
            committed,
            self._ranks_needed(gang, committed, ranks),
            rebuilds=not self._is_resharded(gang, committed, ranks),
        ):
            newest_available = max(committed, newest_available) if newest_available else committed
        chosen = fact.version or (gang.checkpoint.durable_version if fact.durable_path else None)
        require(
            newest_available is None or (chosen is not None and chosen >= newest_available),
            f"invariant 2: generation {fact.generation} starts from {chosen}, though {newest_available} is available",
        )

    def check_saved(self, gang: Gang) -> None:
        """After a planned stop nothing is lost that could have been written to durable storage."""
        committed, durable = self._committed.get(gang.id), self._durable.get(gang.id)
        failed = gang.checkpoint.flush is not None and gang.checkpoint.flush.error
        if gang.plans.stop is None or not gang.spec.durable_dir or committed is None or failed:
            return
        require(
            (durable is not None and durable >= committed)
            or not self._is_available(gang, committed, gang.ranks_of(committed), rebuilds=True),
            f"invariant 2: {gang.id} is stopped at {committed}, and only {durable} is in durable storage",
        )

    def _is_available(self, gang: Gang, version: Version, ranks: int, *, rebuilds: bool) -> bool:
        """The shards of the first `ranks` ranks are on nodes with which the coordinator has been in contact for some
        time. With `rebuilds`, a lost one counts if what it is rebuilt from is there."""
        world = self._world
        if world.schedule.now - self._reachability.coordinator_since < STABLE_CONTACT_S:
            return False
        held: set[int] = set()
        written = range(world.written_ranks(gang.id, version))
        parts: set[tuple[tuple[int, ...], int]] = set()
        for node, member in gang.roster.members.items():
            agent = world.agents.get((gang.id, node))
            if (
                agent is None
                or not agent.is_running()
                or not member.alive
                or agent.identity.incarnation != member.incarnation
            ):
                continue
            if not self._reachability.was_unreachable(COORDINATOR, gang.id, node, STABLE_CONTACT_S):
                held |= {rank for rank in written if version in agent.memory.versions_of(rank)}
                parts |= {(p.ranks, p.part) for p in agent.memory.combined() if p.version == version}
        lost = set(range(ranks)) - held
        return all(rebuilds and self._can_be_rebuilt(rank, held, parts) for rank in lost)

    def _can_be_rebuilt(self, lost: int, held: set[int], parts: set[tuple[tuple[int, ...], int]]) -> bool:
        """Whether all other ranks that are combined are held, and all parts beside the lost rank's own."""
        for ranks in {ranks for ranks, _ in parts if lost in ranks}:
            others = [part for part, rank in enumerate(ranks) if rank != lost]
            if all((ranks, part) in parts and ranks[part] in held for part in others):
                return True
        return False


class RollBackInvariant:
    """By gang: the bad batches that were read, those of them that must not be read again, and the newest roll back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._read: dict[str, set[int]] = {}
        self._left: dict[str, set[int]] = {}
        self._newest: dict[str, facts.RolledBack] = {}

    def batch_read(self, gang: str, batch: int) -> None:
        """A step has read a batch."""
        if batch in self._world.bad_batches[gang]:
            require(
                batch not in self._left.get(gang, set()),
                f"invariant 15: {gang} reads batch {batch} again, because of which it went back",
            )
            self._read.setdefault(gang, set()).add(batch)

    def rolled_back(self, fact: facts.RolledBack) -> None:
        """The gang goes back."""
        read = self._read.get(fact.gang, set())
        at = self._world.batches_read.get((fact.gang, fact.version), fact.version.step)
        bad = [batch for batch in read - self._left.get(fact.gang, set()) if batch <= at]
        require(not bad, f"invariant 15: {fact.gang} goes back to {fact.version}, which has read bad batches {bad}")
        self._left[fact.gang], self._newest[fact.gang] = set(read), fact

    def check_start(self, fact: facts.GenerationStarted) -> None:
        """A generation starts from this version in memory; None: not from memory."""
        newest, version = self._newest.get(fact.gang), fact.version or Version(fact.generation, 0)
        require(
            newest is None or version.generation > newest.generation,
            f"invariant 15: generation {fact.generation} starts from {version}, from before a roll back",
        )


def _of_earlier_run(gang: Gang) -> Version | None:
    """What an earlier run of the job has left. All that the gang itself keeps is newer."""
    return Version(0, 0) if gang.spec.resume_from else None
