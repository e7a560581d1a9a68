"""How fast a gang trains, as its agents' statuses show, and how much flushes slow it down.

Nothing of it is journaled: it is measured again.
"""

from collections import deque
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.events import AgentStatus

_STEPS_KEPT = 32
"""Number of newest steps over which the median is taken."""
_FLUSHES_KEPT = 8
"""Number of newest flushes over which the mean is taken."""
_STEPS_FOR_MEDIAN = 3
"""Number of steps from which on the median is meaningful."""


@dataclass(slots=True)
class StepPace:
    """Step times of one gang, in seconds.

    `progressed_at`: when a rank last reported a further step, or was in a declared phase. `median_step_s`: median
    of the durations of steps; 0 until it is known. `longest_gap_s`: longest time between two steps so far.
    `silences_below_s`: each silence of a rank that ended by itself was shorter; 0: there was none.
    """

    progressed_at: float = 0.0
    median_step_s: float = 0.0
    longest_gap_s: float = 0.0
    silences_below_s: int = 0
    _stepped_at: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    def note_status(self, before: AgentStatus, after: AgentStatus, now: float) -> None:
        """The status of an agent was `before`, and is `after` since `now`."""
        if _in_phase(before) or _in_phase(after):
            self.progressed_at, self._stepped_at = now, 0.0  # time in a declared phase is not part of a step
        elif _further(before, after):
            self.progressed_at = now
        self.silences_below_s = max(self.silences_below_s, 2 * _ended_silence_s(before, after))

    def note_step(self, before: tuple[int, int], after: tuple[int, int], now: float) -> None:
        """The gang's newest (generation, step) was `before`, and is `after` since `now`."""
        if self._stepped_at and before[0] == after[0]:
            gap = now - self._stepped_at
            self._steps.append(gap / (after[1] - before[1]))
            self.longest_gap_s = max(self.longest_gap_s, gap)
            if len(self._steps) >= _STEPS_FOR_MEDIAN:
                self.median_step_s = sorted(self._steps)[len(self._steps) // 2]
        self._stepped_at = now


@dataclass(slots=True)
class FlushCosts:
    """What flushes of one gang take and cost, in seconds; 0: not measured."""

    took_s: float = 0.0
    """How long the newest complete flush took."""
    _began: tuple[int, tuple[int, int], float] | None = None
    """The running flush: its serial, the newest (generation, step) when it was ordered, and when that was."""
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_FLUSHES_KEPT))

    @property
    def stall_s(self) -> float:
        """Mean for which a flush held the training up: its time, less the steps that were finished meanwhile."""
        return max(0.0, sum(self._stalls) / len(self._stalls)) if self._stalls else 0.0

    def begin(self, serial: int, step: tuple[int, int], now: float) -> None:
        """A flush is ordered. `step`: the newest finished (generation, step)."""
        self._began = serial, step, now

    def end(self, serial: int, step: tuple[int, int], median_step_s: float, now: float) -> None:
        """The flush is complete. Without a known pace, or after a restart meanwhile, only its time is known."""
        if self._began is None or self._began[0] != serial:
            return
        _, before, began = self._began
        self._began, self.took_s = None, now - began
        if median_step_s > 0 and before[0] == step[0]:
            # Negative values count as well: the first and the last step were part of the flush in part only.
            self._stalls.append(self.took_s - (step[1] - before[1]) * median_step_s)


def _in_phase(status: AgentStatus) -> bool:
    return any(rank.declared and rank.exit_code is None for rank in status.ranks)


def _further(before: AgentStatus, after: AgentStatus) -> bool:
    known = {(rank.generation, rank.rank): rank.step for rank in before.ranks if rank.progressed}
    return any(rank.progressed and rank.step > known.get((rank.generation, rank.rank), -1) for rank in after.ranks)


def _ended_silence_s(before: AgentStatus, after: AgentStatus) -> int:
    """The longest silence that a rank has ended, in seconds, rounded down to a power of two; 0: no rank has."""
    silent = {(rank.generation, rank.rank): rank.silent_s for rank in before.ranks if rank.silent_s}
    if not silent:
        return 0
    signing = ((rank.generation, rank.rank) for rank in after.ranks if rank.running and rank.silent_s == 0)
    return max((silent.get(rank) or 0 for rank in signing), default=0)
