"""Generations that are ended for standing still.

None is while it moves, or may rest (law 3). A hang is found where there is one, with all agents alive (law 5), and in
good time (law 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.simulator.invariants.outages import HOLD_S
from muster.simulator.invariants.progress import Progress
from muster.simulator.invariants.reachability import BLIND_S, Reach
from muster.simulator.world.violation import must

if TYPE_CHECKING:
    from muster.simulator.world.training import Training
    from muster.simulator.world.world import World

LATE_HANG_S = 8.0
"""A hang is found so long after the end of its allowance at most, where nothing else happens."""
LATE_PHASE_S = 1.5
"""A declared phase is known by then."""

_MUTE = ("its kernel answers, its processes don't", "does not answer")
"""Why a generation is ended for a node whose ranks may live."""


class Hangs:
    """No memory of its own: how long a generation has stood still is seen from its training."""

    def __init__(self, world: World, reach: Reach, progress: Progress) -> None:
        self._world = world
        self._reach = reach
        self._progress = progress

    def fenced(self, fact: facts.GenerationFenced, at: float) -> None:
        """No generation ends for a node that says nothing, while its ranks train on."""
        training = self._started(fact.gang, fact.generation)
        if training is None:
            return
        told_s = at - self._progress.told_at(fact.gang)  # where one node carries all ranks, nobody else tells
        must(
            told_s > min(1.5 * self._world.timing.step(), HOLD_S) or not any(words in fact.cause for words in _MUTE),
            f"law 3: generation {fact.generation} of {fact.gang} is ended {told_s:.1f} s after a step: {fact.cause}",
        )
        idle = at - training.last_step_at
        if "has not reached it" in fact.cause and not training.over:
            must(
                idle > BLIND_S and not _rests(training, at),
                f"law 3: generation {fact.generation} of {fact.gang} is ended, and waits for nobody: {fact.cause}",
            )

    def found(self, core: Core, fact: facts.HangFound, at: float) -> None:
        """A generation is said to hang."""
        gang, training = core.state.gangs[fact.gang], self._started(fact.gang, fact.generation)
        if training is None:
            return
        idle = at - max(training.last_step_at, training.rest_at, gang.started_at)
        must(
            idle >= gang.spec.hang_after_s and not _rests(training, at),
            f"law 3: generation {fact.generation} of {gang.id} is said to hang {idle:.1f} s after it went on",
        )
        for seat in gang.seats:
            since = self._reach.blind_since(seat.node, gang.id, seat.node)
            silent_s = 0.0 if since is None else at - since
            must(
                silent_s < BLIND_S,
                f"law 3: generation {fact.generation} of {gang.id} is said to hang, and the agent on {seat.node} has "
                f"not answered anybody for {silent_s:.1f} s",
            )
        self._found_in_time(core, gang, at - idle, at)

    def _found_in_time(self, core: Core, gang: Gang, since: float, at: float) -> None:
        pace = core.observed.gang(gang.id).pace
        allowed = max(10 * gang.spec.hang_after_s, 20 * pace.median_s, pace.longest_s, 2 * gang.first_step_s)
        quiet_since = max(since, self._reach.coordinator_since, self._reach.disturbed_at)
        late = at - quiet_since - 2**gang.failures * allowed
        must(late < LATE_HANG_S, f"law 4: {gang.id} hung for {late:.1f} s more than it was given")

    def _started(self, gang: str, generation: int) -> Training | None:
        """The generation's training; None: no rank of it was ever started."""
        training = self._world.newest_training(gang)
        return training if training is not None and training.generation == generation else None


def _rests(training: Training, at: float) -> bool:
    """Its ranks are in a declared phase, and have been for so long that it is known."""
    return training.rests and at - training.rest_at >= LATE_PHASE_S
