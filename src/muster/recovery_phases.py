"""The phases of a recovery: which there are, their words, and how long each took. Pure.

Every room may import this module: goodput, metrics, reports and screens show the same phases. They add up to the time
from the first sign of a fault to the first step after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum


class RecoveryPhase(StrEnum):
    """A phase, in their order. The values are the labels in metrics and the categories of goodput."""

    DETECT = "detect"  # from the first sign of the fault to the fence
    FENCE = "fence"  # until no rank of the old generation lives
    PLACE = "place"  # until the next generation starts: spares, pool nodes, node checks, the rendezvous store
    RENDEZVOUS = "rendezvous"  # until every rank runs
    LOAD = "load"  # until every rank has its state
    FIRST_STEP = "first_step"  # until the first step is finished

    @property
    def words(self) -> str:
        """As people read it."""
        return self.value.replace("_", " ")


def phase_seconds(began: float, ends: Sequence[float]) -> Iterator[tuple[RecoveryPhase, float]]:
    """The phases that are over, and how long each took. All times are in seconds.

    `ends`: when each phase ended, in their order. 0: nobody has seen that. Such a phase has taken no time if a later
    one is over. Nor has one that had ended before its turn: ranks may have their states before the last of them runs.
    """
    over = max((place for place, end in enumerate(ends, 1) if end), default=0)
    for phase, end in zip(RecoveryPhase, ends[:over], strict=False):
        yield phase, max(0.0, end - began)
        began = max(began, end)
