"""Invariant 9: no healthy node is named for corrupted data, and a state on which replicas disagree is restored or saved
only if neither memory nor durable storage has another, and with a warning.

What can't be seen is excused: a flip before the replicas have agreed once, and a gang whose replicas are no longer
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.recovery.restore_plan import DISAGREEMENT_WARNING
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World
    from muster.v1 import agent_pb2 as pb


class ReplicaInvariant:
    """By gang: which versions may be restored although their replicas disagree."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._learned: set[tuple[str, int]] = set()
        """Gang and generation, if the commit leader knows that the replicas have agreed."""
        self._agreed: set[str] = set()
        """Gangs that have committed such a version in this run of the job."""
        self._warned_of: set[tuple[str, Version]] = set()
        """Versions that were used with a warning. A later restart from one of them repeats nothing."""
        self._excused: set[tuple[str, Version]] = set()
        """Versions with a disagreement that could not be seen."""

    def version_committed(self, gang: str, order: pb.Order, version: Version) -> None:
        """A commit leader with this order commits a version."""
        if order.agreed_groups:
            self._learned.add((gang, order.generation))
        if self._world.replicas_agree(gang, version, len(order.places)):
            self._agreed.add(gang)
            self._learned |= {(gang, order.generation)} if len(order.places) > 1 else set()
            return
        require(
            (gang, order.generation) not in self._learned or self._comparison_is_over(gang),
            f"invariant 9: {version} is committed, and its replicas disagree",
        )
        self._excused.add((gang, version))

    def check_named(self, fact: facts.ReplicasDisagreed) -> None:
        """The core records a disagreement."""
        machine = self._world.machines.get(fact.node)
        require(
            machine is None or machine.has_flipped_bit,
            f"invariant 9: {fact.node} is named for corrupted data, and no bit has flipped there",
        )
        require(
            any(self._world.machines[node].has_flipped_bit for node in fact.nodes),
            f"invariant 9: replicas are said to disagree on {fact.nodes}, and no bit has flipped there",
        )

    def check_start(self, core: Core, fact: facts.GenerationStarted) -> None:
        """A generation starts from a version."""
        if fact.version is not None:
            ranks = len(fact.sources)
            self._check_last_resort(core, fact.gang, fact.version, lambda _: ranks, fact.warning)

    def check_flush(self, core: Core, fact: facts.FlushOrdered) -> None:
        """A version shall be written to durable storage."""
        ranks_of = core.state.gangs[fact.gang].ranks_of
        self._check_last_resort(core, fact.gang, fact.version, ranks_of, fact.reason)

    def _check_last_resort(
        self, core: Core, gang: str, version: Version, ranks_of: Callable[[Version], int], words: str
    ) -> None:
        """A version is used. If its replicas disagree, no other one is left, and `words` say so.

        `ranks_of`: how many ranks of a version are needed. A flush writes all ranks of it; a smaller generation starts
        from fewer.
        """
        if gang not in self._agreed or (gang, version) in self._excused or self._comparison_is_over(gang):
            return
        if self._world.replicas_agree(gang, version, ranks_of(version)):
            return
        held = self._held(core, gang)
        left = [other for other, have in held.items() if have.issuperset(range(ranks_of(other)))]
        left += [durable] if (durable := core.state.gangs[gang].checkpoint.durable_version) is not None else []
        better = sorted(other for other in left if self._world.replicas_agree(gang, other, ranks_of(other)))
        require(not better, f"invariant 9: {version} is used, and its replicas disagree, though {better} are left")
        require(
            DISAGREEMENT_WARNING in words or (gang, version) in self._warned_of,
            f"invariant 9: {version} is used, and nobody has heard that its replicas disagree",
        )
        self._warned_of.add((gang, version))

    def _held(self, core: Core, gang: str) -> dict[Version, set[int]]:
        """By version: the ranks whose shards the gang's live agents report."""
        held: dict[Version, set[int]] = {}
        for node, agent in core.observed.gang(gang).agents.items():
            is_source = agent.attached and self._world.agents[gang, node].is_running()
            for shard in agent.status.shards if is_source else ():
                held.setdefault(shard.version, set()).add(shard.rank)
        return held

    def run_ended(self, gang: str) -> None:
        """A run of the gang's job is over. The memory that is kept is another run's."""
        self._agreed.discard(gang)

    def _comparison_is_over(self, gang: str) -> bool:
        known = self._world.gang(gang)
        return (
            known is not None
            and known.findings.disagreement is not None
            and known.findings.disagreement.comparison_ends
        )
