"""How long training may wait for a commit.

A step that is due while the last one is not committed yet can't be kept. To wait costs little where commits are slow
for once; where they are always slower than a step it would cost more than a fault does, and skipping is right. So
waiting has an allowance: it is spent by waiting and comes back as a share of all time.
"""

from dataclasses import dataclass

MAX_BUDGET_S = 1.0
"""The allowance is never more. Where a node answers nobody, whether its gang makes steps all the same tells if it is
lost: witnesses need 2 s to find that out, and a commit that the node holds up must not stop the gang for as long."""


@dataclass
class WaitBudget:
    """One rank's allowance, in seconds of a monotonic clock.

    Args:
        share: of all time that may be spent; 0: never wait.
        most_s: what the allowance is at first, and at most.
    """

    share: float
    most_s: float = MAX_BUDGET_S
    _spent_s: float = 0.0
    _at: float | None = None

    def left_s(self, now: float) -> float:
        """So long may be waited from `now` on."""
        if self._at is not None:
            self._spent_s = max(0.0, self._spent_s - self.share * (now - self._at))
        self._at = now
        return max(0.0, self.most_s - self._spent_s) if self.share > 0 else 0.0

    def spent(self, seconds: float) -> None:
        """That much was waited."""
        self._spent_s += seconds
