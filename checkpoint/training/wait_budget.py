"""How long training may wait for a commit.

A step that is due before the last kept step is decided can't be kept. If commits are slow once, waiting costs little.
If commits are always slower than a step, waiting costs more than a fault does, and skipping the snapshot is right. So
each rank has a budget of waiting time: waiting spends it, and it grows again by a share of all time.
"""

from dataclasses import dataclass

MAX_BUDGET_S = 1.0
"""The largest budget, in seconds. Whether a gang still makes steps helps to decide whether a silent node is lost, and
witnesses need 2 s for that decision. A commit that the silent node delays must not stop the gang for as long."""


@dataclass
class WaitBudget:
    """One rank's budget, in seconds of a monotonic clock.

    Args:
        share: of all time that may be spent waiting; 0: never wait.
        max_s: the budget at the start, and the largest budget.
    """

    share: float
    max_s: float = MAX_BUDGET_S
    _spent_s: float = 0.0
    _updated_at: float | None = None

    def remaining_s(self, now: float) -> float:
        """How many seconds may be spent waiting from `now` on."""
        if self._updated_at is not None:
            self._spent_s = max(0.0, self._spent_s - self.share * (now - self._updated_at))
        self._updated_at = now
        return max(0.0, self.max_s - self._spent_s) if self.share > 0 else 0.0

    def spend(self, seconds: float) -> None:
        """Subtract the seconds that were spent waiting."""
        self._spent_s += seconds
