"""Law 1: one generation can run, commit and publish; when one starts, the ranks of all before are dead."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.simulator.world.violation import must

if TYPE_CHECKING:
    from muster.simulator.world.agent import Rank
    from muster.simulator.world.world import World

AFTER_THAW_S = 0.75
"""Ranks that were stopped, and are of an older generation, are gone so soon after they go on."""
LATE_S = 6.0
"""A rank that was started by a late order is gone so soon."""


class Generations:
    """The newest generation of each gang that was started, and that began to train; ranks that came too late."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._started: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._late: list[Rank] = []
        self._went_on: dict[str, float] = {}

    def starts(self, fact: facts.GenerationStarted) -> None:
        """The coordinator lets a generation start."""
        for rank in self._able(fact.gang):
            must(
                rank.generation >= fact.generation,
                f"law 1: generation {fact.generation} starts while rank {rank.rank} of generation {rank.generation} "
                f"lives on {rank.agent.node}",
            )

    def started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""
        must(
            rank.generation > rank.agent.fenced,
            f"law 1: rank {rank.rank} of generation {rank.generation} starts on {rank.agent.node}, which has fenced it",
        )
        if rank.generation < self._started.get(gang, 0):
            # An order that waited in a stopped process or a cut wire. It joins nobody; others tell the agent.
            self._late.append(rank)
            self._world.schedule.later(LATE_S, self._gone, rank.agent.node)
            return
        self._started[gang] = rank.generation
        for other in self._able(gang):
            must(
                other.generation == rank.generation,
                f"law 1: ranks of generations {other.generation} (on {other.agent.node}) and {rank.generation} "
                f"(on {rank.agent.node}) run at once",
            )

    def joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which are on these nodes, have met."""
        began, went_on = self._began.get(gang, 0), max(self._went_on.get(node, -LATE_S) for node in nodes)
        if generation < began and len(nodes) == 1 and self._world.schedule.now - went_on < AFTER_THAW_S:
            return  # on a single node ranks need nobody; who was stopped is ended before long
        must(generation >= began, f"law 1: generation {generation} joins after a newer one")
        self._began[gang] = generation

    def goes_on(self, node: str) -> None:
        """What was stopped on `node` runs again: ranks of older generations must be gone soon."""
        self._went_on[node] = self._world.schedule.now
        self._world.schedule.later(AFTER_THAW_S, self._gone, node)

    def committed(self, gang: str, version: Version) -> None:
        """A leader calls a version committed."""
        must(
            version.generation >= self._began.get(gang, 0),
            f"law 1: generation {version.generation} commits too late",
        )

    def _able(self, gang: str) -> list[Rank]:
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        ranks = [rank for agent in agents if not agent.stopped for rank in agent.ranks.values() if rank.able]
        return [rank for rank in ranks if rank not in self._late] if self._late else ranks

    def _gone(self, node: str) -> None:
        for (gang, name), agent in self._world.agents.items():
            if name == node and not agent.stopped:
                for rank in agent.ranks.values():
                    must(
                        not rank.able or rank.generation >= self._started.get(gang, 0),
                        f"law 1: rank {rank.rank} of generation {rank.generation} still runs on {node}",
                    )
