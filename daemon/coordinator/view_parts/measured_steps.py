"""What the statuses of a gang's agents say of its running generation: the time of a step, and its parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang

FEWEST_STEPS = 8
"""Steps after which a generation is worth keeping: its first ones are slow."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """The step of one rank in seconds, as medians over its newest blocks."""

    rank: int
    compute_s: float
    wait_s: float
    fetch_s: float | None
    """The part of compute in which the script waited for its next batch; None: it declares none."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The steps of a generation. `steps`: how many it has finished. `step_s`: 0 if it is not known."""

    ranks: tuple[RankStep, ...]
    steps: int
    step_s: float

    @property
    def compute_s(self) -> float:
        """The median of all ranks; 0: not measured."""
        return median(one.compute_s for one in self.ranks) if self.ranks else 0.0

    @property
    def wait_s(self) -> float:
        """The median of all ranks; 0: not measured."""
        return median(one.wait_s for one in self.ranks) if self.ranks else 0.0


def measured_steps(gang: Gang, seen: ObservedGang) -> MeasuredSteps:
    """The steps of the gang's newest generation."""
    ranks = tuple(sorted(_ranks(gang, seen), key=lambda one: one.rank))
    generation, step = seen.last_step
    if generation != gang.newest.generation:
        return MeasuredSteps(ranks, 0, 0.0)
    restored = gang.recovery.recoveries[-1].step_restored if gang.recovery.recoveries else 0
    # All ranks of a synchronous job show the same step time, so its parts give it. Gaps between reports are coarser.
    of_parts = median(one.compute_s + one.wait_s for one in ranks) if ranks else 0.0
    return MeasuredSteps(ranks, max(0, step - restored), of_parts or seen.pace.median_step_s)


def _ranks(gang: Gang, seen: ObservedGang) -> Iterator[RankStep]:
    for seat in gang.roster.seats:
        for rank in seen.status(seat.node).ranks:
            times = rank.block_times
            if rank.generation == gang.newest.generation and times is not None and times.compute_us:
                fetch_s = _median_s(times.fetch_us) if times.fetch_us else None
                yield RankStep(rank.rank, _median_s(times.compute_us), _median_s(times.wait_us), fetch_s)


def _median_s(times_us: Sequence[int]) -> float:
    """Quicker than that of Python's library: a job has thousands of ranks, and several readers."""
    ordered, middle = sorted(times_us), len(times_us) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2e6
