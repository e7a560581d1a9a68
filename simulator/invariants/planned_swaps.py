"""Invariant 8: a planned swap costs no finished step, has a precursor or a user's request as its reason, and moves
ranks only where a spare is ready.

The step that all ranks have kept before they left counts as committed (`versions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import NodeHealth, Phase
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class PlannedSwapInvariant:
    """What a planned swap needs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planned: set[tuple[str, int]] = set()
        """Gang and generation of every planned swap."""

    def check_plan(self, core: Core, fact: facts.SwapPlanned) -> None:
        """The core plans to leave a node."""
        self._planned.add((fact.gang, fact.generation))
        gang, machine = core.state.gangs[fact.gang], self._world.machines[fact.node]
        seated = {seat.node for seat in gang.seats}
        spares = [m.node for m in gang.present() if m.node not in seated]
        ready = [name for name in spares if core.state.node(name).health is NodeHealth.FIT]
        requested = bool(fact.requested_by) and self._is_requested(fact.gang, fact.node)
        evidence = machine.has_precursor or machine.has_slow_rank
        require(
            requested or (evidence and not fact.requested_by),
            f"invariant 8: {fact.node} shall be left, without evidence or a request",
        )
        require(bool(ready), f"invariant 8: {fact.node} shall be left, and no spare of {gang.id} is ready")
        require(
            gang.phase is Phase.RUNNING and fact.node in seated,
            f"invariant 8: {fact.node} shall be left, and no rank of {gang.id} trains on it",
        )

    def check_fence(self, gang: Gang, fact: facts.GenerationFenced) -> None:
        """A generation ends. If its ranks were asked to leave, there was a plan."""
        training = self._world.newest_training(fact.gang)
        if training is None or training.generation != fact.generation or fact.cause == facts.PREFLIGHT_CAUSE:
            return
        ranks = training.ranks.values()
        stopped = bool(ranks) and all(rank.exit_code == 0 or rank.stopped_step for rank in ranks)
        left = stopped and gang.stop is None and not self._world.is_finished(fact.gang)
        require(
            not left or (fact.gang, fact.generation) in self._planned,
            f"invariant 8: the ranks of generation {fact.generation} were asked to leave, and no swap was planned",
        )

    def check_removal(self, fact: facts.MemberRemoved) -> None:
        """A node leaves a gang. Nobody is asked to leave but by a user."""
        require(
            not fact.requested or self._is_requested(fact.gang, fact.node),
            f"invariant 8: {fact.node} leaves {fact.gang} on request, and nobody has asked",
        )

    def _is_requested(self, gang: str, node: str) -> bool:
        return (gang, node) in self._world.requested_swaps or node in self._world.requested_drains

    def check_end(self, gang: Gang) -> None:
        """A gang is done. Its ranks have not exited only because they were asked to leave a node."""
        require(
            gang.stop is not None or self._world.is_finished(gang.id),
            f"invariant 8: {gang.id} is done, and its script has not come to its end",
        )
