"""Invariant 1: one generation can run, commit and publish. When one starts, all ranks of earlier ones have ended."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import Version
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.agent import Rank
    from muster.simulator.world.world import World

RESUMED_RANK_TIMEOUT_S = 0.75
"""Seconds after a resume by which ranks of older generations have ended."""
LATE_RANK_TIMEOUT_S = 6.0
"""Seconds by which a rank that was started by an outdated order has ended."""


class GenerationInvariant:
    """By gang: the newest generation that was started and the newest that joined.

    Also the ranks that started too late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest_started: dict[str, int] = {}
        self._newest_joined: dict[str, int] = {}
        self._late_ranks: list[Rank] = []
        self._resumed_at: dict[str, float] = {}

    def check_start(self, fact: facts.GenerationStarted) -> None:
        """The coordinator starts a generation."""
        for rank in self._active_ranks(fact.gang):
            require(
                rank.generation >= fact.generation,
                f"invariant 1: generation {fact.generation} starts while rank {rank.rank} of generation "
                f"{rank.generation} "
                f"is alive on {rank.agent.node}",
            )

    def rank_started(self, gang: str, rank: Rank) -> None:
        """A rank's process was started."""
        require(
            rank.generation > rank.agent.fenced_generation,
            f"invariant 1: rank {rank.rank} of generation {rank.generation} starts on {rank.agent.node}, where it is "
            f"fenced",
        )
        if rank.generation < self._newest_started.get(gang, 0):
            # The order waited in a stopped process or behind a cut. The rank joins no training; peers tell its agent.
            self._late_ranks.append(rank)
            self._world.schedule.call_later(LATE_RANK_TIMEOUT_S, self._check_ranks_gone, rank.agent.node)
            return
        self._newest_started[gang] = rank.generation
        for other in self._active_ranks(gang):
            require(
                other.generation == rank.generation,
                f"invariant 1: ranks of generations {other.generation} (on {other.agent.node}) and {rank.generation} "
                f"(on {rank.agent.node}) run at the same time",
            )

    def generation_joined(self, gang: str, generation: int, nodes: Collection[str]) -> None:
        """All ranks of a generation, which run on these nodes, have joined the rendezvous."""
        newest_joined, resumed_at = (
            self._newest_joined.get(gang, 0),
            max(self._resumed_at.get(node, -LATE_RANK_TIMEOUT_S) for node in nodes),
        )
        if (
            generation < newest_joined
            and len(nodes) == 1
            and self._world.schedule.now - resumed_at < RESUMED_RANK_TIMEOUT_S
        ):
            return  # ranks of a single node need no other host, and resumed ranks end soon
        require(
            generation >= newest_joined,
            f"invariant 1: generation {generation} joins the rendezvous after a newer generation",
        )
        self._newest_joined[gang] = generation

    def node_resumed(self, node: str) -> None:
        """Processes on `node` run again: ranks of older generations must end soon."""
        self._resumed_at[node] = self._world.schedule.now
        self._world.schedule.call_later(RESUMED_RANK_TIMEOUT_S, self._check_ranks_gone, node)

    def version_committed(self, gang: str, version: Version) -> None:
        """A commit leader commits a version."""
        require(
            version.generation >= self._newest_joined.get(gang, 0),
            f"invariant 1: generation {version.generation} commits after a newer generation has started",
        )

    def _active_ranks(self, gang: str) -> list[Rank]:
        agents = [agent for (id, _), agent in self._world.agents.items() if id == gang]
        ranks = [rank for agent in agents if not agent.stopped for rank in agent.ranks.values() if rank.is_active]
        return [rank for rank in ranks if rank not in self._late_ranks] if self._late_ranks else ranks

    def _check_ranks_gone(self, node: str) -> None:
        for (gang, name), agent in self._world.agents.items():
            if name == node and not agent.stopped:
                for rank in agent.ranks.values():
                    require(
                        not rank.is_active or rank.generation >= self._newest_started.get(gang, 0),
                        f"invariant 1: rank {rank.rank} of generation {rank.generation} still runs on {node}",
                    )
