"""What ranks did over time, for the pictures: curves over the steps, and the step time of each rank.

The files are those of `metric_series`, and so are the means and medians. 4,096 ranks have 15 million numbers, so they
are arrays here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy
from numpy.typing import NDArray
from pydantic_core import from_json

from muster.daemon.coordinator.goodput import intervals as account
from muster.daemon.host import metric_series
from muster.launcher.report.report_data import Curve, HeatMap

Array = NDArray[numpy.float64]
MOST_ROWS: Final = 512
"""Rows of a heat map. Of more ranks, neighbours share a row."""
MOST_CURVES: Final = 16
MOST_RANKS: Final = 250_000
"""As in docs/JOBTOML.md."""
_OF_RANK: Final = ("at_s", "step", "step_s", "compute_s")
_OF_NUMBER: Final = ("at_s", "step", "values", "least", "median", "greatest")
"""The columns that the pictures need."""
_FIRST: Final = ("loss", "gradient_norm")
_OUTSTANDING: Final = 1.03
"""A rank whose median is so much larger than that of all stands out."""
_MOST_OUTSTANDING: Final = 8
_WORDS: Final = {"gradient_norm": "gradient norm", "lr": "learning rate"}


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of the job is (0: not known), as `view_parts/training.py` has it: each rank has one GPU."""

    tokens_per_gpu: float = 0.0
    """As job.toml says. What ranks report counts before it."""
    ranks_per_replica: int = 1
    """They read the same batch, so each of them reports all tokens of it."""
    least_s: float = 0.0
    """Seconds in which all GPUs would do the model's own arithmetic at their peak."""


@dataclass(slots=True)
class _Part:
    """One rank or one number in bins of a width. `columns`: by their names in the file."""

    width_s: int
    columns: dict[str, Array]


@dataclass(slots=True)
class Measured:
    """All that the files of a job hold."""

    ranks: dict[int, list[_Part]] = field(default_factory=dict)
    numbers: dict[str, list[_Part]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Files that are not in it, each with the reason in words."""
    most_ranks: int = MOST_RANKS
    """A file with a rank beyond is no file of this job."""

    @property
    def most_bins(self) -> int:
        """Of all files together. A user may write any file, and whoever looks at the job shall have memory for it."""
        return 2 * metric_series.bins_of(self.most_ranks)


def read(run_dir: str, gang: str, ranks: int = 0) -> Measured:
    """The files of all nodes of a gang. `ranks`: how many it has at most; 0: not known."""
    found = Measured(most_ranks=min(ranks or MOST_RANKS, MOST_RANKS))
    for name, text in metric_series.texts(run_dir, gang, found.left_out):
        try:
            _add_node(found, from_json(text))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            found.left_out[name] = f"damaged: it is no series of a node: {type(error).__name__}"
    return found


def _add_node(found: Measured, whole: Mapping[str, Any]) -> None:
    width_s = int(whole["width_s"])
    if not 1 <= width_s <= metric_series.LAST_S:
        raise ValueError("its bins have no width")
    read, ranks, numbers = _Reader(width_s), dict[int, _Part](), dict[str, _Part]()
    for name, columns in whole.items():
        kind, _, key = name.partition(" ")
        if kind == "rank" and columns:
            ranks[_rank(key, found.most_ranks)] = read.part(columns, _OF_RANK)
        elif kind == "number" and columns:
            numbers[key] = read.part(columns, _OF_NUMBER)
    for rank, part in ranks.items():
        found.ranks.setdefault(rank, []).append(part)
    for name, part in numbers.items():
        found.numbers.setdefault(name, []).append(part)


def _rank(text: str, most: int) -> int:
    rank = int(text)
    if not 0 <= rank < most:
        raise ValueError("the job has no such rank")
    return rank


class _Reader:
    """Makes the columns of one node's file into arrays. Its ranks mostly have the same times and steps."""

    def __init__(self, width_s: int) -> None:
        self._width_s = width_s
        self._last: dict[str, tuple[list[float], Array]] = {}

    def part(self, columns: Mapping[str, Any], wanted: tuple[str, ...]) -> _Part:
        """One rank or one number. Raises ValueError: the columns are none."""
        arrays = {name: self._array(name, columns[name]) for name in wanted}
        if len({array.shape for array in arrays.values()}) != 1 or arrays["at_s"].ndim != 1:
            raise ValueError("its columns are not equally long")
        return _Part(self._width_s, arrays)

    def _array(self, name: str, column: list[float]) -> Array:
        known = self._last.get(name)
        if known is None or known[0] != column:
            array = numpy.asarray(column, dtype=numpy.float64)
            most = metric_series.LAST_S if name == "at_s" else metric_series.LARGEST
            if not (numpy.abs(array) <= most).all():
                raise ValueError("not all of its values are numbers")
            known = self._last[name] = column, array
        return known[1]


def logged(measured: Measured, since: float, until: float) -> account.Measured:
    """Which steps a rank has noted between two moments, and when the first of them. All ranks have the same."""
    parts = measured.ranks[min(measured.ranks)] if measured.ranks else []
    within = sorted(
        (float(at_s), int(step))
        for part in parts
        for at_s, step in zip(part.columns["at_s"], part.columns["step"], strict=True)
        if since <= at_s < until
    )
    if not within:
        return account.Measured()
    return account.Measured(first_at=within[0][0], first_step=within[0][1], step=within[-1][1])


def curves_of(measured: Measured, work: Work) -> tuple[Curve, ...]:
    """Throughput first, then loss and gradient norm, then MFU, then what else the script reports."""
    pace = _pace(measured)
    names = [name for name in _FIRST if name in measured.numbers]
    others = sorted(measured.numbers.keys() - {*_FIRST, "tokens"})
    made = [
        _throughput(measured, pace, work),
        *(_number(name, measured) for name in names),
        _mfu(pace, work),
        *(_number(name, measured) for name in others),
    ]
    return tuple(one for one in made if one.steps)[:MOST_CURVES]


def _pace(measured: Measured) -> tuple[Array, Array]:
    """The newest step of each bin, and the median over all ranks of the seconds that a step took."""
    parts = [part for of_rank in measured.ranks.values() for part in of_rank]
    starts, width_s = _bins(parts, measured.most_bins)
    newest = _joined(parts, starts, width_s, "step", numpy.fmax)
    rows = numpy.full((len(measured.ranks), len(starts)), numpy.nan)
    for row, of_rank in zip(rows, measured.ranks.values(), strict=True):
        for part in of_rank:
            known = part.columns["step_s"] > 0
            at = numpy.searchsorted(starts, part.columns["at_s"][known] // width_s * width_s)
            row[at] = part.columns["step_s"][known]
    step_s = _median(rows)
    known = numpy.isfinite(step_s) & numpy.isfinite(newest)
    return newest[known], step_s[known]


def _throughput(measured: Measured, pace: tuple[Array, Array], work: Work) -> Curve:
    steps, step_s = pace
    tokens = work.tokens_per_gpu
    if "tokens" in measured.numbers:
        tokens = statistics.median(_number("tokens", measured).median or (0.0,)) / work.ranks_per_replica
    if tokens:
        return Curve("throughput", "tokens per GPU and second", *_plain(steps, tokens / step_s))
    return Curve("throughput", "steps per second", *_plain(steps, 1 / step_s))


def _mfu(pace: tuple[Array, Array], work: Work) -> Curve:
    steps, step_s = pace
    known = steps[: len(steps) * bool(work.least_s)]
    return Curve("MFU", "percent of the peak of all GPUs", *_plain(known, 100 * work.least_s / step_s[: len(known)]))


def _plain(steps: Array, values: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(steps.tolist()), tuple(values.tolist())


def _number(name: str, measured: Measured) -> Curve:
    """One number of the whole job: as `metric_series.merged_nodes` has it."""
    parts = measured.numbers[name]
    starts, width_s = _bins(parts, measured.most_bins)
    steps, least, greatest = (
        _joined(parts, starts, width_s, column, join)
        for column, join in (("step", numpy.fmax), ("least", numpy.fmin), ("greatest", numpy.fmax))
    )
    counts = numpy.zeros((len(parts), len(starts)))
    sums = numpy.zeros_like(counts)
    for row, part in enumerate(parts):
        at = numpy.searchsorted(starts, part.columns["at_s"] // width_s * width_s)
        numpy.add.at(counts[row], at, part.columns["values"])
        numpy.add.at(sums[row], at, part.columns["values"] * part.columns["median"])
    median = _weighted_median(
        numpy.divide(sums, counts, where=counts > 0, out=numpy.full_like(sums, numpy.nan)), counts
    )
    known = numpy.isfinite(median)
    values = (tuple(array[known].tolist()) for array in (steps, median, least, greatest))
    return Curve(_WORDS.get(name, name), "", *values)


def _weighted_median(values: Array, weights: Array) -> Array:
    """Of each column: half of the weight lies on values that are not larger. Between two values, their mean."""
    order = numpy.argsort(values, axis=0)  # NaN last
    values, weights = numpy.take_along_axis(values, order, 0), numpy.take_along_axis(weights, order, 0)
    passed, half = numpy.cumsum(weights, axis=0), weights.sum(axis=0) / 2
    at = numpy.argmax(passed >= half, axis=0)
    after = numpy.minimum(at + (numpy.take_along_axis(passed, at[None], 0)[0] == half), len(values) - 1)
    both = numpy.stack([numpy.take_along_axis(values, row[None], 0)[0] for row in (at, after)])
    return numpy.asarray(both.mean(axis=0))


def _bins(parts: list[_Part], most: int) -> tuple[Array, int]:
    """The starts of all bins, in the widest ones that a part has, or in wider ones if there are more than `most`."""
    width_s = max((part.width_s for part in parts), default=1)
    times = {id(part.columns["at_s"]): part.columns["at_s"] for part in parts}
    if not times:
        return numpy.empty(0), width_s
    every = numpy.unique(numpy.concatenate([numpy.unique(at_s // width_s) for at_s in times.values()])) * width_s
    while len(every) > most:
        width_s *= 2
        every = numpy.unique(every // width_s * width_s)
    return every, width_s


def _joined(
    parts: list[_Part], starts: Array, width_s: int, column: str, join: Callable[[Array, Array], Array]
) -> Array:
    """One column of all parts: the greatest or the least value in each bin."""
    found = numpy.full(len(starts), numpy.nan)
    for part in parts:
        at = numpy.searchsorted(starts, part.columns["at_s"] // width_s * width_s)
        if part.width_s == width_s:
            found[at] = join(found[at], part.columns[column])
        else:
            join.at(found, at, part.columns[column])  # type: ignore[attr-defined]
    return found


def _median(rows: Array) -> Array:
    """Of each column, without NaN."""
    if not len(rows):
        return numpy.empty(rows.shape[1])
    order = numpy.sort(rows, axis=0)  # NaN last
    counts = numpy.isfinite(rows).sum(axis=0)
    low, high = (numpy.clip(at, 0, len(rows) - 1) for at in ((counts - 1) // 2, counts // 2))
    columns = numpy.arange(rows.shape[1])
    return numpy.asarray(numpy.where(counts, (order[low, columns] + order[high, columns]) / 2, numpy.nan))


def heat_of(measured: Measured) -> HeatMap | None:
    """The time of each rank in a step, without what it waits for others, as far as that is known. None: no rank has
    finished a step."""
    parts = [part for of_rank in measured.ranks.values() for part in of_rank]
    starts, width_s = _bins(parts, measured.most_bins)
    if not parts:
        return None
    column = "compute_s" if any((part.columns["compute_s"] > 0).any() for part in parts) else "step_s"
    ranks = 1 + max(measured.ranks)
    kept = starts
    if (starts[-1] - starts[0]) / width_s <= 2 * metric_series.MOST_BINS:  # no step: an empty place, as long as it was
        kept = numpy.arange(starts[0], starts[-1] + width_s, width_s)
    per_row = -(-ranks // MOST_ROWS)
    rows = numpy.full((-(-ranks // per_row), len(kept)), numpy.nan, dtype=numpy.float32)
    medians = dict[int, float]()
    for rank, of_rank in measured.ranks.items():
        values = numpy.full(len(kept), numpy.nan, dtype=numpy.float32)
        for part in of_rank:
            at = numpy.searchsorted(kept, part.columns["at_s"] // width_s * width_s)
            known = part.columns[column] > 0
            numpy.fmax.at(values, at[known], part.columns[column][known].astype(numpy.float32))
        numpy.fmax(rows[rank // per_row], values, out=rows[rank // per_row])
        if (known_values := values[numpy.isfinite(values)]).size:
            medians[rank] = float(numpy.median(known_values))
    return HeatMap(
        float(kept[0]), float(kept[-1] + width_s), ranks, per_row, tuple(map(tuple, rows.tolist())),
        _outstanding(medians), is_own=column == "compute_s",
    )  # fmt: skip


def _outstanding(medians: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    whole = statistics.median(medians.values()) if medians else 0.0
    slow = [(rank, value) for rank, value in sorted(medians.items()) if value > _OUTSTANDING * whole]
    return tuple(sorted(slow, key=lambda item: -item[1])[:_MOST_OUTSTANDING])
