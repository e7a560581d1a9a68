"""Invariant 10: no generation starts on a node whose check has failed while a node that passed was there, and no node
is left out for a check that it did not fail. Invariant 11: Muster resumes only a node that it drained itself, for
evidence against the node, and that has passed a check since.

A seat that a node kept from the generation before is not examined: a check says where ranks start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection import drain_reason
from muster.daemon.coordinator.core.detection.drain_reason import DrainSource
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import CheckOutcome
from muster.daemon.coordinator.core.state.gang import Gang
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World
    from muster.slurm.client.types import Node


class NodeCheckInvariant:
    """What node checks decide, compared with what they found."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seated: dict[str, set[str]] = {}
        """Gang → the nodes of its newest generation."""

    def check_start(self, core: Core, gang: Gang, fact: facts.GenerationStarted) -> None:
        """The coordinator starts a generation."""
        seated = {seat.node for seat in fact.seats}
        new = seated - self._seated.get(gang.id, set())
        self._seated[gang.id] = seated
        # A result that the coordinator has not heard of says nothing about its decision.
        checks = {node: gang.roster.members[node].check for node in new} if gang.spec.preflight else {}
        unproven = {node for node, check in checks.items() if check is None or check.outcome.is_bad}
        ready = [seat.node for seat in fact.spares if self._has_passed(core, gang, seat.node)]
        require(
            not unproven or not ready,
            f"invariant 10: generation {fact.generation} starts on {unproven}, not checked or failed; {ready} passed",
        )

    def run_ended(self, gang: str) -> None:
        """Slurm starts the job again: all seats are new."""
        self._seated.pop(gang, None)

    def check_removal(self, fact: facts.MemberRemoved) -> None:
        """A node leaves a gang."""
        require(
            ReasonPhrase.CHECK_FAILED not in fact.reason or self._has_failed(fact.gang, fact.node),
            f"invariant 10: {fact.node} is left out of {fact.gang} for its check, which it did not fail",
        )

    def _has_failed(self, gang: str, node: str) -> bool:
        check = self._world.agents[gang, node].node_check
        return check is not None and check.outcome.is_bad

    def _has_passed(self, core: Core, gang: Gang, node: str) -> bool:
        check = gang.roster.members[node].check
        passed = check is not None and check.outcome is CheckOutcome.PASSED
        return passed and node not in core.index.out_of_service


class ResumeInvariant:
    """`_passed_at`: node → when its daemon last found that it passes; absent if its newest check has found faults."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._passed_at: dict[str, float] = {}

    def node_checked(self, node: str, outcome: str) -> None:
        """The daemon of a node has checked the node."""
        if outcome == "passed":
            self._passed_at[node] = self._world.schedule.now
        else:
            self._passed_at.pop(node, None)

    def check_resume(self, before: Node) -> None:
        """Muster has resumed the node, which was drained like this before."""
        reason = drain_reason.parse(before.reason)
        require(
            reason is not None and reason.source is DrainSource.NODE,
            f"invariant 11: Muster resumes {before.name}, which it did not drain: {before.reason}",
        )
        require(
            self._passed_at.get(before.name, 0.0) > (before.reason_at or 0.0),
            f"invariant 11: Muster resumes {before.name}, which has passed no check since its drain",
        )
