"""One rank's step times as its agent reports them: medians over blocks of 4 steps, the newest 8 of them.

The median of a block keeps a single slow step out (a log line, a collection of garbage). Blocks have the same steps on
every rank, so that ranks can be compared although their agents report at different moments. A report has the newest 32
steps: agents report within 0.25 s, so no block is missed with steps of 8 ms or more. A report stays small: some 50
bytes a rank.
"""

from collections import deque

from muster.v1.agent_pb2 import BlockTimes
from muster.v1.rank_pb2 import StepTime

STEPS_PER_BLOCK = 4
"""Steps of a block: the fewest of which a single one can be left out on both sides of the median."""
BLOCKS_KEPT = 8
"""Newest blocks that are reported."""


class StepBlocks:
    """The measured steps of one rank in one generation."""

    def __init__(self) -> None:
        self._number = -1
        self._steps: dict[int, StepTime] = {}
        self._blocks: deque[tuple[int, int, int]] = deque(maxlen=BLOCKS_KEPT)
        self._last_block = -1

    def add(self, step_time: StepTime) -> None:
        """Add one step. Steps come in order; a step of a block that is past is ignored."""
        number = (step_time.step - 1) // STEPS_PER_BLOCK
        if step_time.step < 1 or number < self._number or number <= self._last_block:
            return
        if number > self._number:
            self._number, self._steps = number, {}
        self._steps[step_time.step] = step_time
        if len(self._steps) == STEPS_PER_BLOCK:
            self._complete()

    def times(self) -> BlockTimes | None:
        """The newest blocks without a gap; None if there are none."""
        if not self._blocks:
            return None
        compute_us, wait_us, fetch_us = zip(*self._blocks, strict=True)
        first_block = self._last_block - len(self._blocks) + 1
        declared = fetch_us if any(fetch_us) else ()
        return BlockTimes(first_block=first_block, compute_us=compute_us, wait_us=wait_us, fetch_us=declared)

    def _complete(self) -> None:
        if self._number != self._last_block + 1:
            self._blocks.clear()
        self._last_block = self._number
        steps = self._steps.values()
        parts = ([s.compute_us for s in steps], [s.wait_us for s in steps], [s.fetch_us for s in steps])
        compute_us, wait_us, fetch_us = map(_median, parts)
        self._blocks.append((compute_us, wait_us, fetch_us))


def _median(times_us: list[int]) -> int:
    middle = sorted(times_us)[1:-1]
    return sum(middle) // len(middle)
