"""What the ranks of one node did over time, in one bounded file for each node: `RUN_DIR/logs/GANG/series/NODE.json`.

The agent of the node writes it, beside the logs. Whoever draws the job's past reads the files of all nodes
(`read_job`). They hold all runs of the job: a requeued run has the same folder, and an agent that comes back goes on
with its node's file.

Time is cut into bins of equal width, which begin at multiples of it. Each rank has in each bin how many steps it has
finished, the newest one, and the means of its times. Each number that ranks have reported has in each bin how many
values there were, the least, the median and the greatest, and whose these are. When there are more than 512 bins,
their width is doubled, and neighbours are merged: counts are added, and means and medians become means, weighted by
the counts. In a job of more than 1,024 ranks there are fewer bins (`bins_of`). So a file has at most some 200 kB,
whatever the length of the job. A person can read it.

All functions on files block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from muster.daemon.host.held_folder import HeldFolder, UntrustedPath
from muster.daemon.host.rank_log_files import hold_log_folder, log_folder

MOST_BINS, FEWEST_BINS = 512, 64
_RANK_BINS = 1 << 19
"""Bins of all ranks of a job: more would take long to read."""
MOST_RANKS = 16
"""Ranks of a node in one bin. Those of more are left out."""
MOST_NAMES = 32
"""Names of numbers of one node."""
NAME_LETTERS = 64
"""The longest name of a number. Longer ones are cut."""
LARGEST = 1e290
"""The largest value that is kept: the sums of larger ones, by which means are taken, would not be finite."""
LAST_S = 1 << 36
"""The last moment of a bin, in the year 4147."""
FIRST_WIDTH_S = 4
"""Seconds of a bin at first: 512 bins last for half an hour."""
_FORMAT = 1
_FOLDER, _SUFFIX = "series", ".json"
_MOST_BYTES = 8 << 20
"""Of a file that is read: several times what a full one has."""


def bins_of(ranks: int) -> int:
    """The most bins of each node of a job with so many ranks."""
    return max(FEWEST_BINS, min(MOST_BINS, _RANK_BINS // max(1, ranks)))


def can_be_kept(value: float) -> bool:
    """Whether a value is finite, and no larger than what is kept."""
    return abs(value) <= LARGEST


class RankPoint(NamedTuple):
    """One rank in one bin. `steps`: how many it has finished, the newest of which is `step`. The times are means, in
    seconds; 0: not measured. `fetch_s` is a part of `compute_s`."""

    steps: int
    step: int
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    fetch_s: float = 0.0


class NumberPoint(NamedTuple):
    """One number in one bin. `values`: how many finite ones were reported, up to `step`. `least_rank`,
    `greatest_rank`: who has reported the least and the greatest."""

    step: int
    values: int
    least: float
    median: float
    greatest: float
    least_rank: int
    greatest_rank: int


Bins = dict[int, Any]
"""Points by the start of their bins, in seconds since the epoch."""
Key = TypeVar("Key", int, str)


@dataclass(slots=True)
class NodeSeries:
    """All bins of one node. `width_s`: of a bin, in seconds. `most_bins`: the width is doubled when there are more."""

    node: str
    width_s: int = FIRST_WIDTH_S
    ranks: dict[int, dict[int, RankPoint]] = field(default_factory=dict)
    numbers: dict[str, dict[int, NumberPoint]] = field(default_factory=dict)
    most_bins: int = field(default=MOST_BINS, compare=False)
    _starts: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._note_starts()

    def add_rank(self, at_s: float, rank: int, point: RankPoint) -> None:
        """Add what a rank has done up to `at_s` (seconds since the epoch)."""
        start = self._start(at_s)
        bins = self.ranks.get(rank, {})
        if start in bins or sum(start in others for others in self.ranks.values()) < MOST_RANKS:
            _add(self.ranks.setdefault(rank, bins), start, point, merged_ranks)
            self._widen(start)

    def add_number(self, at_s: float, name: str, point: NumberPoint) -> None:
        """Add what ranks have reported up to `at_s`. A value that is not finite, or too large, is not added."""
        name = name[:NAME_LETTERS]
        known = name in self.numbers or len(self.numbers) < MOST_NAMES
        if known and all(map(can_be_kept, (point.least, point.median, point.greatest))):
            start = self._start(at_s)
            _add(self.numbers.setdefault(name, {}), start, point, merged_in_time)
            self._widen(start)

    def _start(self, at_s: float) -> int:
        return int(at_s) // self.width_s * self.width_s

    def _widen(self, start: int) -> None:
        """There is a bin at `start`. Double the width of all until they are few enough."""
        self._starts.add(start)
        while len(self._starts) > self.most_bins:
            self.width_s *= 2
            self.ranks = {rank: self._merged(bins, merged_ranks) for rank, bins in self.ranks.items()}
            self.numbers = {name: self._merged(bins, merged_in_time) for name, bins in self.numbers.items()}
            self._note_starts()

    def _note_starts(self) -> None:
        self._starts = set().union(*self.ranks.values(), *self.numbers.values())

    def _merged(self, bins: Bins, merge: Callable[[Any, Any], Any]) -> Bins:
        wider: Bins = {}
        for start, point in sorted(bins.items()):
            _add(wider, self._start(start), point, merge)
        return wider


def _add(bins: Bins, start: int, point: Any, merge: Callable[[Any, Any], Any]) -> None:
    bins[start] = merge(bins[start], point) if start in bins else point


def merged_ranks(one: RankPoint, later: RankPoint) -> RankPoint:
    """Two points of one rank. A mean that is not measured counts for nothing."""

    def mean(first: float, second: float) -> float:
        first_weight, second_weight = one.steps * (first > 0), later.steps * (second > 0)
        whole = first_weight + second_weight
        return (first * first_weight + second * second_weight) / whole if whole else first or second

    return RankPoint(one.steps + later.steps, later.step, *map(mean, one[2:], later[2:]))


def merged_in_time(one: NumberPoint, later: NumberPoint) -> NumberPoint:
    """Two points of one number, one after the other. The median becomes the mean of both: a curve follows it."""
    count = one.values + later.values
    median = (one.median * one.values + later.median * later.values) / count if count else later.median
    return _extremes(count, median, (one, later))


def merged_nodes(points: Iterable[NumberPoint]) -> NumberPoint:
    """The points of one number on several nodes, at one time. The median is the weighted median of their medians: half
    of all values lie on the nodes whose medians are not larger. It is exact where each node has one value."""
    by_median = sorted(points, key=lambda point: point.median)
    whole = sum(point.values for point in by_median)
    passed, median = 0, by_median[-1].median
    for point, following in zip(by_median, [*by_median[1:], by_median[-1]], strict=True):
        passed += point.values
        if 2 * passed >= whole:
            median = (point.median + following.median) / 2 if 2 * passed == whole else point.median
            break
    return _extremes(whole, median, by_median)


def _extremes(count: int, median: float, points: Sequence[NumberPoint]) -> NumberPoint:
    least = min(points, key=lambda point: (point.least, point.least_rank))
    greatest = max(points, key=lambda point: (point.greatest, -point.greatest_rank))
    step = max(point.step for point in points)
    return NumberPoint(step, count, least.least, median, greatest.greatest, least.least_rank, greatest.greatest_rank)


@dataclass(frozen=True, slots=True)
class JobSeries:
    """The series of all nodes. `left_out`: files that are not in it, each with the reason in words."""

    nodes: tuple[NodeSeries, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all numbers."""
        return sorted({name for series in self.nodes for name in series.numbers})

    def number(self, name: str) -> dict[int, NumberPoint]:
        """One number of the whole job, in the widest bins that a node has. In the order of time."""
        width_s = max((series.width_s for series in self.nodes if name in series.numbers), default=FIRST_WIDTH_S)
        found: dict[int, list[NumberPoint]] = {}
        for series in self.nodes:
            bins: Bins = {}
            for start, point in series.numbers.get(name, {}).items():
                _add(bins, start // width_s * width_s, point, merged_in_time)
            for start, point in bins.items():
                found.setdefault(start, []).append(point)
        return {start: merged_nodes(points) for start, points in sorted(found.items())}

    def rank(self, rank: int) -> dict[int, RankPoint]:
        """What one rank did, on all nodes that it ran on. In the order of time."""
        parts = [series.ranks[rank] for series in self.nodes if rank in series.ranks]
        return dict(sorted(item for bins in parts for item in bins.items()))

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return sorted({rank for series in self.nodes for rank in series.ranks})


def write_node(run_dir: str, gang: str, series: NodeSeries) -> None:
    """Replace the file of one node. A reader sees the old file or the new one. The run folder must exist.

    Raises:
        OSError: it can't be written, or another user has taken a name on its way.
    """
    write_text(run_dir, gang, series.node, as_text(series))


def write_text(run_dir: str, gang: str, node: str, text: str) -> None:
    """The same with the text of the series, which then may change meanwhile."""
    part = f".{node}.part"
    with hold_log_folder(run_dir, gang, _FOLDER) as folder:
        with open(folder.create(part), "w", encoding="utf-8") as file:
            file.write(text)
        folder.rename(part, f"{node}{_SUFFIX}")


def read_node(run_dir: str, gang: str, node: str) -> NodeSeries:
    """The series of one node, to go on with. An empty one if there is no file, or no good one."""
    try:
        with HeldFolder.open_to_pass(log_folder(run_dir, gang) / _FOLDER) as folder:
            found = from_text(_read(folder, f"{node}{_SUFFIX}"))
    except (OSError, ValueError):
        return NodeSeries(node)
    return found if found.node == node else NodeSeries(node)


def read_job(run_dir: str, gang: str) -> JobSeries:
    """The series of all nodes of a gang, of all its runs. Files that are no good are left out, and named."""
    found, left_out = [], dict[str, str]()
    for name, text in texts(run_dir, gang, left_out):
        try:
            found.append(from_text(text))
        except ValueError as error:
            left_out[name] = f"damaged: {error}"
    return JobSeries(tuple(found), left_out)


def texts(run_dir: str, gang: str, left_out: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """The file of each node of a gang, with its name. `left_out` gets the files that can't be read, with the reason in
    words."""
    path = log_folder(run_dir, gang) / _FOLDER
    try:
        with HeldFolder.open(path) as folder:
            for name in sorted(name for name in folder.names() if name.endswith(_SUFFIX)):
                try:
                    yield name, _read(folder, name)
                except UntrustedPath as error:
                    left_out[name] = f"foreign: {error.strerror}"
                except OSError as error:
                    left_out[name] = f"unreadable: {error.strerror}"
                except ValueError as error:
                    left_out[name] = f"damaged: {error}"
    except FileNotFoundError:
        pass  # no rank has finished a step yet
    except OSError as error:
        left_out[str(path)] = f"unreadable: {error.strerror}"


def as_text(series: NodeSeries) -> str:
    """The file's text: columns, one line for each rank and each number."""
    rows = [
        *(f'"rank {rank}": {_columns(bins, RankPoint._fields)}' for rank, bins in sorted(series.ranks.items())),
        *(
            f"{json.dumps(f'number {name}')}: {_columns(bins, NumberPoint._fields)}"
            for name, bins in series.numbers.items()
        ),
    ]
    head = {"format": _FORMAT, "node": series.node, "width_s": series.width_s}
    return "{" + ",\n".join([json.dumps(head)[1:-1], *rows]) + "}\n"


def from_text(text: str | bytes) -> NodeSeries:
    """The series that a file holds.

    Raises:
        ValueError: the text is no series; in words.
    """
    try:
        whole = json.loads(text, parse_constant=_refuse)
        if whole["format"] != _FORMAT:
            raise ValueError(f"its format is {whole['format']!r}, and this version reads {_FORMAT}")
        node, width_s = str(whole["node"]), int(whole["width_s"])
        if not 1 <= width_s <= LAST_S:
            raise ValueError("its bins have no width")
        keys = [(name, *name.partition(" ")[::2]) for name in whole]
        ranks = {int(key): dict(_points(whole[name], RankPoint)) for name, kind, key in keys if kind == "rank"}
        numbers = {key: dict(_points(whole[name], NumberPoint)) for name, kind, key in keys if kind == "number"}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no series of a node: {type(error).__name__}") from None
    return NodeSeries(node, width_s, ranks, numbers)


def _columns(bins: Bins, fields: Iterable[str]) -> str:
    rows = [(start, *point) for start, point in sorted(bins.items())]
    columns = zip(*rows, strict=True) if rows else iter(())
    named = {
        name: [_short(value) for value in column] for name, column in zip(("at_s", *fields), columns, strict=False)
    }
    return json.dumps(named, separators=(",", ":"), allow_nan=False)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _points(columns: dict[str, list[Any]], point: Any) -> Iterator[tuple[int, Any]]:
    if not columns:
        return
    at_s, *values = (columns[name] for name in ("at_s", *point._fields))
    numbers = all({int, float} >= set(map(type, column)) for column in values) and {int} >= set(map(type, at_s))
    if not numbers or not all(can_be_kept(end) for column in values if column for end in (min(column), max(column))):
        raise ValueError("not all of its values are finite numbers")
    if at_s and not 0 <= min(at_s) <= max(at_s) <= LAST_S:
        raise ValueError("not all of its times are moments of this age")
    yield from zip(at_s, map(point._make, zip(*values, strict=True)), strict=True)


def _refuse(word: str) -> float:
    raise ValueError(f"it holds {word}, which is no number")


def _read(folder: HeldFolder, name: str) -> bytes:
    with os.fdopen(folder.open_file(name), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return data
