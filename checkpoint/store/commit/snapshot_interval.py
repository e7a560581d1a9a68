"""How many steps apart snapshots are, if the job leaves that to Muster (every="auto"). Pure.

The agent on rank 0's node, the commit leader, decides. Its node has rank 0, which tells the other ranks, so that all
ranks keep the same steps. It decides from what it has measured: how long a step takes, for how long a snapshot holds
the slowest rank up, and by how much its copies delay the training (`copy_delay`). The order of the generation says how
often the nodes of the job fail.

The interval is Daly's (`reliability.daly_interval`), with two bounds:

- A snapshot whose cost is at most NEGLIGIBLE_SHARE of the time may come more often: up to every step. How often nodes
  fail is known badly, and rarer snapshots would save nothing that anybody notices.
- At least one step lies between two snapshots.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from muster.checkpoint.store.commit.copy_delay import ENOUGH_SAMPLES, SAMPLES, CopyDelay
from muster.fabric.cost.reliability import daly_interval

NEGLIGIBLE_SHARE = 0.001
"""Share of the training time that snapshots may take without regard to how rare failures are."""
KEPT_WITHIN = 0.2
"""An interval stays as long as the best one differs from it by this part at most: the costs of a snapshot are nearly
the same in that range, and each change would be shown as news."""
PERIOD_S, MIN_PERIOD_STEPS, MAX_PERIOD_STEPS = 30.0, 8, 100_000
"""Seconds after which the ranks look whether the interval has changed: a look costs each of them one question to the
rendezvous store. And the fewest and the most steps of that time."""


def best_interval(mtbf_s: float, cost_s: float, step_s: float) -> int:
    """Steps between two snapshots, 1 or more.

    Args:
        mtbf_s: seconds between two failures of the job's nodes; 0: not known, so that only cheap snapshots count.
        cost_s: seconds by which one snapshot, with its copies, delays the training.
        step_s: seconds of a step without a snapshot.
    """
    if cost_s <= 0 or step_s <= 0:
        return 1
    negligible_s = cost_s / NEGLIGIBLE_SHARE
    interval_s = min(negligible_s, daly_interval(mtbf_s, cost_s)) if mtbf_s > 0 else negligible_s
    return max(1, round(interval_s / step_s))


@dataclass
class SnapshotCosts:
    """What snapshots of one generation cost. Times are seconds.

    `every`, `auto`: the interval in effect, as rank 0 reports it; 0: it has reported none yet.
    `slots_s`: in which the slots of rank 0 were made; 0: before its first snapshot.
    """

    mtbf_s: float = 0.0
    every: int = 0
    auto: bool = False
    slots_s: float = 0.0
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _stepped: tuple[int, float] | None = None
    """The newest step of rank 0, and when it was finished."""
    _stalled_since: float = 0.0
    """How long snapshots have held rank 0 up since then."""
    _copies: CopyDelay = field(default_factory=CopyDelay)
    _chosen: int = 1

    def note_step(self, step: int, now: float) -> None:
        """Rank 0 has finished a step. A step that it finishes again is not a new one."""
        if self._stepped is not None:
            before, at = self._stepped
            if step <= before:
                return
            step_s = max(0.0, now - at - self._stalled_since) / (step - before)
            self._steps.append(step_s)
            self._copies.note_step(step_s, step - before)
        self._stepped, self._stalled_since = (step, now), 0.0

    def note_pause(self) -> None:
        """Rank 0 is in a declared phase: the time until its next step is not that of a step."""
        self._stepped = None
        self._copies.pause()

    def note_snapshot(self, stall_s: float, every: int, *, auto: bool) -> None:
        """Rank 0 has taken a snapshot."""
        self.every, self.auto = every, auto
        self._stalled_since += stall_s
        self._copies.begin()

    def note_committed(self, stall_s: float) -> None:
        """A snapshot was committed that held the slowest rank of all nodes up for so long."""
        self._copies.end()
        if stall_s > 0:
            self._stalls.append(stall_s)

    @property
    def stall_s(self) -> float:
        """Median for which a snapshot holds the slowest rank up; 0: not measured."""
        return median(self._stalls) if self._stalls else 0.0

    @property
    def step_s(self) -> float:
        """Median of a step without a snapshot, while nothing is copied if there are such steps; 0: not measured."""
        return self._copies.clear_step_s or (median(self._steps) if self._steps else 0.0)

    @property
    def delay_s(self) -> float:
        """By how much the copies of one version delay the training; 0: not measured, or nothing that is certain."""
        return self._copies.delay_s

    def choose(self) -> int:
        """The number of steps between two snapshots from now on."""
        if min(len(self._stalls), len(self._steps)) >= ENOUGH_SAMPLES:
            best = best_interval(self.mtbf_s, self.stall_s + self.delay_s, self.step_s)
            if abs(best - self._chosen) > KEPT_WITHIN * self._chosen:
                self._chosen = best
        return self._chosen

    def period(self) -> int:
        """Steps after which the ranks look whether the interval has changed."""
        steps = round(PERIOD_S / self.step_s) if self.step_s else 0
        return min(max(steps, MIN_PERIOD_STEPS), MAX_PERIOD_STEPS)
