"""How fast a gang trains, as its agents' statuses show, and how much flushes slow it down.

Nothing of it is journaled: it is measured again.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.events import AgentStatus, FlushProgress

_STEPS_KEPT = 32
"""Number of newest steps over which the median is taken."""
_FLUSHES_KEPT = 8
"""Number of newest flushes over which the mean is taken."""
_STEPS_FOR_MEDIAN = 3
"""Number of steps from which on the median is meaningful."""
FLUSH_STALL_S = 120.0
"""Seconds within which storage has to take LEAST_FLUSH_BYTES from a node, or all that the node has left."""
LEAST_FLUSH_BYTES = 240_000_000
"""2 MB/s. It is more than what a node counts as written before it is on disk (posix_folder.WRITE_BACK_BYTES)."""


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


@dataclass(frozen=True, slots=True)
class _Mark:
    """When a node had last written LEAST_FLUSH_BYTES more, and how many bytes that made."""

    at: float
    written: int


@dataclass(slots=True)
class FlushPace:
    """Whether storage takes what the nodes of one gang write of the running flush.

    `check_at`: until then (seconds) no node can be late.
    """

    check_at: float = 0.0
    _serial: int = 0
    _marks: dict[str, _Mark] = field(default_factory=dict)
    _newest: dict[str, FlushProgress] = field(default_factory=dict)
    _grown_at: dict[str, float] = field(default_factory=dict)
    """When each node last reported more bytes than before."""

    def begin(self, serial: int) -> None:
        """Flush `serial` runs."""
        if serial != self._serial:
            self._serial, self.check_at, self._marks, self._newest, self._grown_at = serial, 0.0, {}, {}, {}

    def note(self, node: str, progress: FlushProgress | None, now: float) -> None:
        """A node reports what it has written."""
        if progress is None or progress.serial < self._serial:
            return
        self.begin(progress.serial)
        before = self._newest.get(node)
        if before is None or progress.written > before.written:
            self._grown_at[node] = now
        self._newest[node] = progress
        mark = self._marks.get(node)
        if mark is None or progress.written >= mark.written + LEAST_FLUSH_BYTES or mark.written < _all_of(progress):
            self._marks[node] = _Mark(now, progress.written)

    def progress(self, serial: int) -> dict[str, FlushProgress]:
        """What each node has reported of flush `serial`."""
        return dict(self._newest) if serial == self._serial else {}

    def quietest(self) -> tuple[str, float]:
        """The node, of those with more to write, that has written nothing for longest, and since when (seconds). An
        empty name: no node has more to write."""
        writing = [node for node, progress in self._newest.items() if not _all_of(progress)]
        node = min(sorted(writing), key=self._grown_at.__getitem__, default="")
        return node, self._grown_at.get(node, 0.0)

    def late_at(self, pending: Collection[str], start: float) -> tuple[float, str]:
        """When a flush is to be given up (seconds), and the node that is late then.

        A node that has written all its bytes waits for others. Where all have, the flush leader completes the folder.

        Args:
            pending: the nodes whose part is not over.
            start: when the flush was ordered, or this coordinator began to observe.
        """
        marked_at = {node: max(start, mark.at if (mark := self._marks.get(node)) else start) for node in pending}
        writing = [node for node in sorted(pending) if node not in self._newest or not _all_of(self._newest[node])]
        node = min(writing, key=marked_at.__getitem__) if writing else max(marked_at, key=marked_at.__getitem__)
        self.check_at = marked_at[node] + FLUSH_STALL_S
        return self.check_at, node

    def words(self, node: str, asked_at: float, now: float) -> str:
        """Why the flush is given up."""
        progress = self._newest.get(node)
        if progress is None:
            return f"not written within {FLUSH_STALL_S:.0f} s"
        rate = progress.written / max(now - asked_at, 1.0) / 1e6
        return (
            f"{node}: storage is dead or too slow: of {progress.total / 1e9:.2f} GB, {progress.written / 1e9:.2f} GB "
            f"were written in {now - asked_at:.0f} s ({rate:.1f} MB/s), and less than "
            f"{LEAST_FLUSH_BYTES / 1e6:.0f} MB in the last {FLUSH_STALL_S:.0f} s"
        )


def _all_of(progress: FlushProgress) -> int:
    """All bytes of a node, if it has written them; 0: it has not."""
    return progress.total if progress.written >= progress.total else 0


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
