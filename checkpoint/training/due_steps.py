"""Which steps are kept: every N-th, where N is the user's number or, with every="auto", what Muster finds best.

All ranks must call a step due that any of them calls due: they keep the same steps, and when names or shapes change
they plan together. So with "auto" the ranks agree, through the store of their process group:

1. From its first step on, a rank keeps every step. After some steps, the period, it looks for another interval.
2. At each look, rank 0 writes the interval and the period that its agent has named, for the look after this one. Then
   every rank reads what rank 0 wrote at the look before.

So a rank waits for rank 0 only if rank 0 is a whole period behind, and between two looks no rank asks anything.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from muster.checkpoint.training.agent_connection import FIRST_PERIOD
from muster.checkpoint.training.agreements.joint_planning import RanksWithStore

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Interval:
    """Every `every`-th step counted from `start` on is due. The ranks look again at the first step from `until` on;
    None: never."""

    start: int
    every: int
    until: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this finished step is due."""
        return (step - self.start) % self.every == 0

    def first_due(self, step: int) -> int:
        """The first due step from `step` on."""
        return self.start + max(0, -(-(step - self.start) // self.every)) * self.every


class DueSteps:
    """The due steps of one rank.

    Args:
        every: the user's number of steps, or None for "auto".
        join_group: returns this rank's place among others, when the first step is finished; None: the rank is alone.
    """

    def __init__(self, every: int | None, join_group: Callable[[], RanksWithStore | None] = lambda: None) -> None:
        self.is_auto = every is None
        self._join_group = join_group
        self._group: RanksWithStore | None = None
        self._now = Interval(0, every or 1)
        self._before = self._now
        self._looks = 0
        self._advice: tuple[int, int] = (1, FIRST_PERIOD)

    @property
    def every(self) -> int:
        """Steps between two snapshots now."""
        return self._now.every

    def advise(self, every: int, period: int) -> None:
        """Rank 0's agent names the best interval, and the steps until the ranks shall look again."""
        self._advice = (max(1, every), max(1, period))

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of the finished `step` is due. With "auto", every rank asks this for each step."""
        if self.is_auto and (self._looks == 0 or (self._now.until is not None and step >= self._now.until)):
            self._look(step)
        return self._now.is_due(step)

    def first_due(self, step: int) -> int:
        """The first due step from `step` on. Of earlier intervals only the last one is remembered."""
        if step >= self._now.start:
            return self._now.first_due(step)
        return min(self._before.first_due(step), self._now.start)

    def _look(self, step: int) -> None:
        if self._looks == 0:
            self._group = self._join_group()
        try:
            every, period = self._agree()
        except RuntimeError as error:  # what torch.distributed raises if the store is gone
            log.warning("snapshots stay %d steps apart: %s", self._now.every, error)
            self._looks, self._now = self._looks + 1, replace(self._now, until=None)
            return
        self._looks += 1
        self._before, self._now = self._now, Interval(step, every, step + max(period, every))

    def _agree(self) -> tuple[int, int]:
        """What rank 0 wrote at the look before; at the first look, every step."""
        group = self._group
        if group is not None and group.rank == 0:
            group.store.set(str(self._looks + 1), "{} {}".format(*self._advice))
        if self._looks == 0:
            return 1, FIRST_PERIOD
        if group is None:
            return self._advice
        every, period = group.store.get(str(self._looks)).split()
        return int(every), int(period)
