"""Invariant 4 for seats: a generation starts on as many nodes as its job asks for, and its store is on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class SeatInvariant:
    """Stateless: the fact holds everything."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_start(self, gang: Gang, fact: facts.GenerationStarted) -> None:
        """The coordinator starts a generation."""
        require(
            fact.master_node in {seat.node for seat in fact.seats},
            f"invariant 4: the store of generation {fact.generation} is on {fact.master_node}, which carries no ranks",
        )
        first = min(fact.seats, key=lambda seat: seat.group_rank).node
        require(
            not self._world.rank_opens_store or fact.master_node == first,
            f"invariant 4: rank 0 of generation {fact.generation} is on {first}, and its store on {fact.master_node}",
        )
        # No spare waits while a seat is empty, and no fewer nodes train than the job asks for. A gang that has shrunk
        # stays small: a node that joins later waits for a seat.
        count = len(fact.seats)
        full = count == gang.spec.nodes or fact.action in ("restart in place", "swap")
        require(
            gang.spec.fewest <= count <= gang.spec.nodes and (full or not fact.spares),
            f"invariant 4: generation {fact.generation} starts on {count} nodes and leaves {len(fact.spares)} spares "
            f"waiting",
        )
