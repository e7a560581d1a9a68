"""What the ranks of one node say of their training, put together: for the agent's status, and in bins of time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from muster.checkpoint.format.number_page import MOST_NUMBERS
from muster.checkpoint.store.rank_samples import RankSample
from muster.daemon.host.metric_series import NodeSeries, NumberPoint, RankPoint, can_be_kept
from muster.v1.agent_pb2 import NodeTraining
from muster.v1.common_pb2 import RankNumber

_SAMPLES_KEPT = 16
"""Samples over which the time of a step is taken."""


class NodeSamples:
    """The samples of one generation, one after the other."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._first: tuple[int, float] | None = None
        """The oldest step that was seen, and when."""
        self._newest: dict[str, dict[int, int]] = {}
        """By name and rank: the newest step of which a value was added to the series."""

    def add(self, samples: Sequence[RankSample], at_s: float, series: NodeSeries | None) -> NodeTraining | None:
        """Add a sample of all ranks, taken at `at_s` (seconds since the epoch), to the series. Returns what the status
        says; None: the ranks have said nothing yet."""
        for sample in samples:
            if (point := self._point(sample)) is not None and series is not None:
                series.add_rank(at_s, sample.rank, point)
        if series is not None:
            for name, values in _by_name(samples).items():
                known = self._newest.setdefault(name, {})
                fresh = {rank: value for rank, value in values.items() if known.get(rank) != value[0]}
                known.update({rank: step for rank, (step, _) in fresh.items()})
                if fresh:
                    series.add_number(at_s, name, _number_point(fresh))
        if not any(sample.numbers.step for sample in samples) and not _by_name(samples):
            return None
        self._first = self._first or (min(sample.numbers.step for sample in samples), at_s)
        return self._status(samples, *self._first)

    def _point(self, sample: RankSample) -> RankPoint | None:
        """What the rank has done since the last sample; None: no step."""
        said = sample.numbers
        steps = self._steps.setdefault(sample.rank, deque(maxlen=_SAMPLES_KEPT))
        before = steps[-1] if steps else None
        if said.step <= (before[0] if before else 0):
            return None
        steps.append((said.step, said.at_s))
        times, count = sample.times, max(1, sample.times.steps)
        compute_s, wait_s, fetch_s = times.compute_s / count, times.wait_s / count, times.fetch_s / count
        finished = said.step - before[0] if before else 1  # the first step of a generation may have any number
        between_s = max(0.0, said.at_s - before[1]) / finished if before else 0.0
        return RankPoint(finished, said.step, between_s or compute_s + wait_s, compute_s, wait_s, fetch_s)

    def _status(self, samples: Sequence[RankSample], first_step: int, first_at_s: float) -> NodeTraining:
        found = _by_name(samples)
        return NodeTraining(
            generation=self.generation,
            numbers=[_node_number(name, found[name]) for name in list(found)[:MOST_NUMBERS]],
            last_step=max(sample.numbers.last_step for sample in samples),
            step_s=median(times) if (times := list(self._step_times())) else 0.0,
            flops=sum(sample.numbers.flops for sample in samples),
            step=max(sample.numbers.step for sample in samples),
            first_step=first_step,
            first_at_s=first_at_s,
            skips_batches=all(sample.numbers.skips_batches for sample in samples),
        )

    def _step_times(self) -> Iterator[float]:
        for steps in self._steps.values():
            (first, began), (last, ended) = steps[0], steps[-1]
            if last > first and ended > began:
                yield (ended - began) / (last - first)


def _by_name(samples: Sequence[RankSample]) -> dict[str, dict[int, tuple[int, float]]]:
    """The finite values by name and rank, each with its step, without those that are too large for sums."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for sample in samples:
        for name, (step, value) in sample.numbers.numbers.items():
            if can_be_kept(value):
                found.setdefault(name, {})[sample.rank] = (step, value)
    return found


def _number_point(values: dict[int, tuple[int, float]]) -> NumberPoint:
    ranks = sorted(values, key=lambda rank: (values[rank][1], rank))
    least, greatest, middle = ranks[0], ranks[-1], median(value for _, value in values.values())
    step = max(step for step, _ in values.values())
    return NumberPoint(step, len(values), values[least][1], middle, values[greatest][1], least, greatest)


def _node_number(name: str, values: dict[int, tuple[int, float]]) -> RankNumber:
    point = _number_point(values)
    return RankNumber(
        name=name,
        step=point.step,
        ranks=point.values,
        least=point.least,
        median=point.median,
        greatest=point.greatest,
        least_rank=point.least_rank,
        greatest_rank=point.greatest_rank,
    )
