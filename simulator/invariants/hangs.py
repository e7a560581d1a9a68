"""Generations that are ended for standing still.

None is while it moves, or may rest (law 3). A hang is found where there is one, with all agents alive (law 5), and in
good time (law 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.simulator.ground_truth.progress import Progress
from muster.simulator.ground_truth.reachability import WITNESS_WINDOW_S, Reachability
from muster.simulator.invariants.outages import OUTAGE_HOLD_S
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.training import Training
    from muster.simulator.world.world import World

MAX_DETECTION_DELAY_S = 8.0
"""A hang is found so long after the end of its allowance at most, where nothing else happens."""
PHASE_REPORT_DELAY_S = 1.5
"""A declared phase is known by then."""

_SILENT_NODE_CAUSES = ("its kernel answers, its processes don't", "does not answer")
"""Why a generation is ended for a node whose ranks may live."""


class HangInvariant:
    """No memory of its own: how long a generation has stood still is seen from its training."""

    def __init__(self, world: World, reachability: Reachability, progress: Progress) -> None:
        self._world = world
        self._reachability = reachability
        self._progress = progress

    def check_fence(self, fact: facts.GenerationFenced, at: float) -> None:
        """No generation ends for a node that says nothing, while its ranks train on."""
        training = self._training(fact.gang, fact.generation)
        if training is None:
            return
        told_s = at - self._progress.reported_at(fact.gang)  # where one node carries all ranks, nobody else tells
        require(
            told_s > min(1.5 * self._world.durations.step_s(), OUTAGE_HOLD_S)
            or not any(words in fact.cause for words in _SILENT_NODE_CAUSES),
            f"law 3: generation {fact.generation} of {fact.gang} is ended {told_s:.1f} s after a step: {fact.cause}",
        )
        idle = at - training.last_step_at
        if "has not reached it" in fact.cause and not training.over:
            require(
                idle > WITNESS_WINDOW_S and not _in_known_phase(training, at),
                f"law 3: generation {fact.generation} of {fact.gang} is ended, and waits for nobody: {fact.cause}",
            )

    def check_hang(self, core: Core, fact: facts.HangFound, at: float) -> None:
        """A generation is said to hang."""
        gang, training = core.state.gangs[fact.gang], self._training(fact.gang, fact.generation)
        if training is None:
            return
        idle = at - max(training.last_step_at, training.phase_changed_at, gang.started_at)
        require(
            idle >= gang.spec.hang_after_s and not _in_known_phase(training, at),
            f"law 3: generation {fact.generation} of {gang.id} is said to hang {idle:.1f} s after it went on",
        )
        for seat in gang.seats:
            since = self._reachability.unreachable_since(seat.node, gang.id, seat.node)
            silent_s = 0.0 if since is None else at - since
            require(
                silent_s < WITNESS_WINDOW_S,
                f"law 3: generation {fact.generation} of {gang.id} is said to hang, and the agent on {seat.node} has "
                f"not answered anybody for {silent_s:.1f} s",
            )
        self._check_delay(core, gang, at - idle, at)

    def _check_delay(self, core: Core, gang: Gang, since: float, at: float) -> None:
        pace = core.observed.gang(gang.id).pace
        allowed = max(10 * gang.spec.hang_after_s, 20 * pace.median_s, pace.longest_s, 2 * gang.first_step_s)
        quiet_since = max(since, self._reachability.coordinator_since, self._reachability.changed_at)
        late = at - quiet_since - 2**gang.failures * allowed
        require(late < MAX_DETECTION_DELAY_S, f"law 4: {gang.id} hung for {late:.1f} s more than it was given")

    def _training(self, gang: str, generation: int) -> Training | None:
        """The generation's training; None: no rank of it was ever started."""
        training = self._world.newest_training(gang)
        return training if training is not None and training.generation == generation else None


def _in_known_phase(training: Training, at: float) -> bool:
    """Its ranks are in a declared phase, and have been for so long that it is known."""
    return training.in_declared_phase and at - training.phase_changed_at >= PHASE_REPORT_DELAY_S
