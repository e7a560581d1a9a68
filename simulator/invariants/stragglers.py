"""Invariant 12: only a slow rank is named a straggler, with the node that it runs on; its node is left only after the
rank was a straggler for as long as the site says, and for no rank is a second node left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class StragglerInvariant:
    """Which nodes were left for which rank, in this run of each gang's job, and since when each generation has a
    straggler on a node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._named_at: dict[tuple[str, int, str], float] = {}
        self._left: dict[tuple[str, int], str] = {}

    def check_named(self, fact: facts.StragglerDetected, at: float) -> None:
        """The core records a straggler, or that it has lasted."""
        who = f"invariant 12: rank {fact.rank} of {fact.gang} on {fact.node}"
        training = self._world.newest_training(fact.gang)
        rank = training.ranks.get(fact.rank) if training and training.generation == fact.generation else None
        require(rank is None or rank.agent.node == fact.node, f"{who} is named, and runs elsewhere")
        since = self._world.step_times.slow_since(fact.gang, fact.rank, fact.node)
        require(since is not None, f"{who} is named a straggler, and was never slow")
        named_at = self._named_at.setdefault((fact.gang, fact.generation, fact.node), at)
        rule = self._world.limits.straggler
        if fact.response is None or rule is None:
            return
        require(at - named_at >= rule.share * rule.window_s, f"{who} has not lasted as long as the site says")
        if fact.response is Response.SWAP:
            first = self._left.setdefault((fact.gang, fact.rank), fact.node)
            require(first == fact.node, f"{who} shall be left, although the rank was as slow on {first}")

    def run_ended(self, gang: str) -> None:
        """A run of the gang's job is over."""
        self._left = {key: node for key, node in self._left.items() if key[0] != gang}
