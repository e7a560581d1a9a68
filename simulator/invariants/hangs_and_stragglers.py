"""Invariants 3, 4 and 12 for ranks that hang or are slow.

No generation is ended for a hang while it makes steps, or while it is in a declared phase (3). A hang is found only
while every agent is alive (3), and it is found in time (4). Only a slow rank is named a straggler, with the node that
it runs on; its node is left only after the rank was a straggler for as long as the site says, and for no rank is a
second node left (12).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.invariants.ground_truth import WITNESS_WINDOW_S, Progress, Reachability
from muster.simulator.invariants.outages import OUTAGE_HOLD_S
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.training import Training
    from muster.simulator.world.world import World


MAX_DETECTION_DELAY_S = 8.0
"""Seconds after the hang timeout by which a hang is found if nothing else happens."""
MIN_SILENCE_S, MIN_IDLE_S = 7.0, 5.0
"""Seconds without a sign of life of one rank, and without a step, after which that rank may be named."""
MEASURED_LATE = 1.25
"""Part of the time for which ranks may be idle by which their agents have found that they were, for as long."""
PHASE_REPORT_DELAY_S = 1.5
"""Seconds by which the coordinator knows a declared phase."""


class HangInvariant:
    """Stateless: the training itself shows how long a generation has made no step."""

    def __init__(self, world: World, reachability: Reachability, progress: Progress) -> None:
        self._world = world
        self._reachability = reachability
        self._progress = progress

    def check_fence(self, fact: facts.GenerationFenced, at: float) -> None:
        """No generation is ended because of a silent node while its ranks train on."""
        training = self._training(fact.gang, fact.generation)
        if training is None:
            return
        # If one node carries all ranks, no other node reports steps.
        reported_s = at - self._progress.reported_at(fact.gang)
        require(
            reported_s > min(1.5 * self._world.durations.step_s(), OUTAGE_HOLD_S)
            or not any(words in fact.cause for words in (ReasonPhrase.KERNEL_ONLY, ReasonPhrase.NO_ANSWER)),
            f"invariant 3: generation {fact.generation} of {fact.gang} is ended {reported_s:.1f} s after a reported "
            f"step: {fact.cause}",
        )
        idle_s = at - training.last_step_at
        if ReasonPhrase.AGENT_UNREACHED in fact.cause and not training.over:
            require(
                idle_s > WITNESS_WINDOW_S and not _in_known_phase(training, at),
                f"invariant 3: generation {fact.generation} of {fact.gang} is ended while it makes steps or is in a "
                f"declared phase: {fact.cause}",
            )

    def check_hang(self, core: Core, fact: facts.HangDetected, at: float) -> None:
        """The core finds a hang."""
        gang, training = core.state.gangs[fact.gang], self._training(fact.gang, fact.generation)
        if training is None:
            return
        idle_s = at - max(training.last_step_at, training.phase_changed_at, gang.newest.started_at)
        if all_idle := ReasonPhrase.ALL_RANKS_IDLE in fact.reason:
            idle_s = training.idle_s(at, MAX_DETECTION_DELAY_S + (MEASURED_LATE - 1) * gang.spec.hang_after_idle_s)
            _check_idle_ranks(training, gang, idle_s)
        silent = ReasonPhrase.RANK_SILENT in fact.reason
        if silent:
            _check_silent_rank(training, fact, at)
        least_s = gang.spec.hang_after_idle_s if all_idle else gang.spec.hang_after_s
        require(
            idle_s >= min(least_s, MIN_IDLE_S if silent else inf) and not _in_known_phase(training, at),
            f"invariant 3: generation {fact.generation} of {gang.id} is called hung {idle_s:.1f} s after its last "
            f"step or phase",
        )
        for seat in gang.roster.seats:
            since = self._reachability.unreachable_since(seat.node, gang.id, seat.node)
            silent_s = 0.0 if since is None else at - since
            require(
                silent_s < WITNESS_WINDOW_S,
                f"invariant 3: generation {fact.generation} of {gang.id} is called hung, and the agent on {seat.node} "
                f"has been silent for {silent_s:.1f} s",
            )
        allowed_s = MEASURED_LATE * gang.spec.hang_after_idle_s if all_idle else _step_allowance_s(core, gang)
        self._check_delay(gang, allowed_s, at - idle_s, at)

    def _check_delay(self, gang: Gang, allowed: float, since: float, at: float) -> None:
        unchanged_since = max(since, self._reachability.coordinator_since, self._reachability.changed_at)
        late_s = at - unchanged_since - 2**gang.recovery.failures_in_a_row * allowed
        require(late_s < MAX_DETECTION_DELAY_S, f"invariant 4: {gang.id} hung for {late_s:.1f} s longer than allowed")

    def _training(self, gang: str, generation: int) -> Training | None:
        """The generation's training. None: no rank of it was ever started."""
        training = self._world.newest_training(gang)
        return training if training is not None and training.generation == generation else None


def _step_allowance_s(core: Core, gang: Gang) -> float:
    """Seconds that a step may take at most, without failures before."""
    pace = core.observed.gang(gang.id).pace
    return max(10 * gang.spec.hang_after_s, 20 * pace.median_step_s, pace.longest_gap_s, 2 * gang.newest.first_step_s)


def _check_silent_rank(training: Training, fact: facts.HangDetected, at: float) -> None:
    """A rank is named only while no Python runs in it, for long, and while it does in all others."""
    since = training.phase_changed_at
    silent = {rank.agent.node: at - max(rank.silent_since, since) for rank in training.ranks.values() if rank.silent}
    require(
        list(silent) == [fact.node] and silent[fact.node] >= MIN_SILENCE_S,
        f"invariant 3: generation {fact.generation} of {fact.gang} is called hung because of a rank on {fact.node}; "
        f"silent ranks, in seconds: {silent}",
    )


def _check_idle_ranks(training: Training, gang: Gang, idle_s: float) -> None:
    """A hang is found by idleness only if every rank has been idle for as long as the job allows."""
    computing = [rank.rank for rank in training.ranks.values() if rank.silent]
    require(
        idle_s >= gang.spec.hang_after_idle_s > 0 and not computing,
        f"invariant 3: generation {training.generation} of {gang.id} is called hung after {idle_s:.1f} s of idleness; "
        f"ranks that compute: {computing}",
    )


def _in_known_phase(training: Training, at: float) -> bool:
    """The ranks are in a declared phase, and have been there for long enough that the coordinator knows."""
    return training.in_declared_phase and at - training.phase_changed_at >= PHASE_REPORT_DELAY_S


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
