"""How the training of this node's ranks goes, sampled: the newest of what their pages say, and their step times.

A rank sends its page once (`number_page`). Nothing else is sent for it: who wants to know takes a sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.checkpoint.format import number_page
from muster.checkpoint.format.number_page import RankNumbers
from muster.v1.rank_pb2 import RankProgress

WATCHED = {"loss": "loss", "gradient_norm": "gradient norm"}
"""Numbers that must be finite, each with its name in words."""


@dataclass(slots=True)
class StepTimes:
    """Sums over measured steps of one rank, in seconds."""

    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankSample:
    """One rank. `numbers`: what its page says now. `times`: of the steps that were measured since the last sample."""

    rank: int
    numbers: RankNumbers
    times: StepTimes = field(default_factory=StepTimes)


class RankSamples:
    """The ranks of one generation.

    Args:
        on_not_finite: called with a rank, a step and words when a watched number is NaN or infinite.
    """

    def __init__(self, on_not_finite: Callable[[int, int, str], None]) -> None:
        self._on_not_finite = on_not_finite
        self._pages: dict[int, int] = {}
        self.begin_generation()

    def begin_generation(self) -> None:
        """A new generation runs: the pages of the old one are closed."""
        self.close()
        self._said: dict[int, tuple[int, RankNumbers]] = {}
        self._times: dict[int, StepTimes] = {}

    def add_page(self, rank: int, descriptor: int) -> None:
        """A rank of the running generation has sent its page. This owns the descriptor."""
        if (before := self._pages.pop(rank, None)) is not None:
            os.close(before)
        self._pages[rank] = descriptor
        self._said.pop(rank, None)

    def note_progress(self, rank: int, progress: RankProgress) -> None:
        """A rank has finished a step, and tells what it has measured."""
        for measured in progress.step_times:
            times = self._times.setdefault(rank, StepTimes())
            times.steps += 1
            times.compute_s += measured.compute_us / 1e6
            times.wait_s += measured.wait_us / 1e6
            times.fetch_s += measured.fetch_us / 1e6

    def take(self) -> list[RankSample]:
        """All ranks that have a page, as they are now."""
        for rank, descriptor in self._pages.items():
            before = self._said.get(rank, (0, RankNumbers()))[0]
            if (found := number_page.read(descriptor, before)) is not None:
                self._said[rank] = found
                self._watch(rank, found[1])
        times, self._times = self._times, {}
        return [RankSample(rank, said, times.get(rank, StepTimes())) for rank, (_, said) in sorted(self._said.items())]

    def close(self) -> None:
        """Close all pages."""
        for descriptor in self._pages.values():
            os.close(descriptor)
        self._pages = {}

    def _watch(self, rank: int, said: RankNumbers) -> None:
        found = [(said.numbers[name], words) for name, words in WATCHED.items() if name in said.numbers]
        wrong = [(step, f"{words} = {value}") for (step, value), words in found if not math.isfinite(value)]
        if wrong:
            self._on_not_finite(rank, wrong[0][0], ", ".join(words for _, words in wrong))
