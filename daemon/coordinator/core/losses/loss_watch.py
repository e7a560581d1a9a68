"""Spikes and plateaus of the loss that a gang reports.

The values of one node are watched, the first that has reported in the generation: replicas follow the same curve. Each
value is the median of that node's ranks. A robust z-score compares it with the median of the ordinary values before, in
units of their median absolute deviation, so earlier outliers count little.

A plateau: over the newer half of all values, the later part is not lower than the earlier one. So the span grows with
the training, and a curve that flattens as usual is none.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from statistics import fmean, median

from muster.daemon.coordinator.core.losses.loss_rule import LossRule

SPIKE_SHARE = 0.1
"""A spike is so much of the median above it, too: a loss that hardly scatters makes small steps."""
LEVEL_VALUES = 32
"""So many high values in a row are a new level, and are ordinary from then on."""
BLOCK = 64
"""Values of which one median is kept for plateaus."""
BLOCKS_KEPT = 16
"""Blocks, at most. Then two neighbours become one."""
PROGRESS_SHARE = 5e-3
"""After a plateau, the loss makes progress again once it has fallen by so much of itself."""
_MAD_TO_DEVIATION = 1.4826
"""For a normal distribution."""
_LEAST_DEVIATION = 1e-3
"""Part of the median that counts as a deviation at least: a loss that does not scatter at all."""
_WAITING = 64
"""Values that wait for a judgement, at most."""


class LossKind(StrEnum):
    """What a curve of losses shows."""

    SPIKE = "spike"
    PLATEAU = "plateau"


@dataclass(frozen=True, slots=True)
class LossFinding:
    """A spike that begins at `step`, or a plateau that is found there. `value`: the loss. `usual`: the median before.
    `newest_step`: of the values seen so far. `ordinary_step`: of the newest value before the spike."""

    kind: LossKind
    node: str
    step: int
    value: float
    usual: float
    newest_step: int
    ordinary_step: int


@dataclass(slots=True)
class LossWatch:
    """The losses of one gang. A restarted coordinator begins anew."""

    ordinary_step: int = 0
    """The step of the newest ordinary value of the running generation; 0: none was seen."""
    _generation: int = 0
    _node: str = ""
    _step: int = 0
    _furthest: int = 0
    """The newest step of any generation. What is done again adds nothing to a plateau."""
    _waiting: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WAITING))
    _ordinary: deque[tuple[int, float]] = field(default_factory=deque)
    """Steps and values of the window."""
    _high: list[tuple[int, float]] = field(default_factory=list)
    """The newest values, if they are high."""
    _block: list[float] = field(default_factory=list)
    _medians: list[float] = field(default_factory=list)
    """Of the blocks that are being put together."""
    _blocks: list[float] = field(default_factory=list)
    _per_block: int = 1
    """Medians that make a block."""
    _is_flat: bool = False

    def add(self, generation: int, node: str, step: int, value: float) -> None:
        """A node reports the loss of a step. Only the first node of a generation counts, and each step once."""
        if generation > self._generation:
            self._begin(generation, node, step)
        if (generation, node) == (self._generation, self._node) and step > self._step and isfinite(value):
            self._step = step
            self._waiting.append((step, value))

    @property
    def has_new(self) -> bool:
        """Values have come since the last judgement."""
        return bool(self._waiting)

    def judge(self, rule: LossRule) -> list[LossFinding]:
        """What the values show that have come since the last call."""
        found = []
        while self._waiting:
            step, value = self._waiting.popleft()
            found += [one for one in (self._spike(step, value, rule), self._plateau(step, value, rule)) if one]
        return found

    def _begin(self, generation: int, node: str, step: int) -> None:
        """Values of steps that are done again are compared with those before, and not with later ones."""
        self._generation, self._node, self._step = generation, node, step - 1
        self.ordinary_step = 0
        self._waiting.clear()
        self._high.clear()
        self._ordinary = deque(one for one in self._ordinary if one[0] < step)

    def _spike(self, step: int, value: float, rule: LossRule) -> LossFinding | None:
        """A spike is said once, when enough values in a row are high."""
        if not self._is_high(value, rule):
            self._high.clear()
            self.ordinary_step = step
            self._ordinary.append((step, value))
            while len(self._ordinary) > rule.window:
                self._ordinary.popleft()
            return None
        self._high.append((step, value))
        found = None
        if len(self._high) == rule.in_a_row:
            found = self._found_spike(step, rule)
        if len(self._high) == max(LEVEL_VALUES, rule.in_a_row):
            self._ordinary = deque(self._high)
            self._high.clear()
        return found

    def _found_spike(self, step: int, rule: LossRule) -> LossFinding:
        """The newest values are high. It may have begun while too few values were known to say so."""
        known = list(self._ordinary)
        high = list(self._high)
        while known and self._is_high(known[-1][1], rule):
            high.insert(0, known.pop())
        highest = max(value for _, value in high)
        ordinary = known[-1][0] if known else 0
        return LossFinding(LossKind.SPIKE, self._node, high[0][0], highest, self._usual(), step, ordinary)

    def _is_high(self, value: float, rule: LossRule) -> bool:
        if 2 * len(self._ordinary) < rule.window:
            return False
        middle = self._usual()
        scatter = _MAD_TO_DEVIATION * median(abs(one - middle) for _, one in self._ordinary)
        deviation = max(scatter, _LEAST_DEVIATION * abs(middle))
        # Without a deviation the loss was 0 all the time, and nothing says what is large.
        return deviation > 0 and value - middle > max(rule.deviations * deviation, SPIKE_SHARE * abs(middle))

    def _usual(self) -> float:
        return median(value for _, value in self._ordinary)

    def _plateau(self, step: int, value: float, rule: LossRule) -> LossFinding | None:
        """A plateau is said once, until there is progress again."""
        if not rule.plateau_values or step <= self._furthest:
            return None
        self._furthest = step
        self._block.append(value)
        if len(self._block) < BLOCK or not self._end_block():
            return None
        half = self._blocks[len(self._blocks) // 2 :]
        if len(half) < 4 or len(half) * self._per_block * BLOCK < rule.plateau_values:
            return None
        earlier, later = fmean(half[: len(half) // 2]), fmean(half[(len(half) + 1) // 2 :])
        if self._is_flat or later < earlier:
            self._is_flat &= later >= earlier - PROGRESS_SHARE * abs(earlier)
            return None
        self._is_flat = True
        return LossFinding(LossKind.PLATEAU, self._node, step, later, earlier, step, step)

    def _end_block(self) -> bool:
        """Whether a block is whole now."""
        self._medians.append(median(self._block))
        self._block.clear()
        if len(self._medians) < self._per_block:
            return False
        self._blocks.append(fmean(self._medians))
        self._medians.clear()
        if len(self._blocks) == BLOCKS_KEPT:
            self._blocks = [fmean(pair) for pair in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
            self._per_block *= 2
        return True
