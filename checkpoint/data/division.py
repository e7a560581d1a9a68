"""Which samples a step reads, and which rank reads which of them: a pure function of the position.

The *position* counts samples over all epochs and all ranks: with 1,000 samples, position 2,300 is sample 300 in the
order of epoch 2. A step reads the next `step_samples` positions. They are dealt in micro-batches, one after the
other, and of each micro-batch rank 0 reads the first `batch_size`, rank 1 the next ones, and so on. So the position
says what has been read, whatever the number of ranks was, and any number of ranks goes on from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from muster.checkpoint.data.permutation import Permutation, Positions, numbers_at

EpochEnd = Literal["carry", "drop", "pad"]

_COMPUTED_AT_ONCE = 4096
"""Samples of a rank that are looked up in one go: numpy's calls cost some microseconds each, however few numbers they
get."""


@dataclass(frozen=True)
class Division:
    """How the samples are divided.

    Args:
        samples: of an epoch.
        batch_size: samples that a rank reads at once.
        accumulation: batches of each rank that make one step of the optimizer.
        rank, num_replicas: which of how many ranks with samples of their own.
        epoch_end: what the last step of an epoch does, for which too few samples are left. "carry": it takes the first
            ones of the next epoch as well. "drop": there is no such step. "pad": it is smaller, and takes samples
            from the epoch's begin again, fewer than there are ranks, so that all ranks have equally many.
        seed: of the orders, and of the samples' own seeds.
        shuffle: False: every epoch is in the data set's own order.
        with_seeds: a sample is a pair of its number and of a seed of its own.
    """

    samples: int
    batch_size: int
    accumulation: int
    rank: int
    num_replicas: int
    epoch_end: EpochEnd
    seed: int
    shuffle: bool
    with_seeds: bool

    @property
    def round_samples(self) -> int:
        """Samples that all ranks together read with one batch each."""
        return self.batch_size * self.num_replicas

    @property
    def step_samples(self) -> int:
        """Samples that a step reads, unless it is the last one of an epoch."""
        return self.round_samples * self.accumulation

    @property
    def epoch_batches(self) -> int:
        """Batches of one rank in an epoch that is read from its begin; an upper bound if samples are carried over."""
        return self.batches_between(0, self.end(0))

    def begin(self, position: int) -> int:
        """Where the next step begins: there, or at the next epoch if the samples that are left are dropped."""
        left = self._epoch_end(position) - position
        return position + left if self.epoch_end == "drop" and left < self.step_samples else position

    def after_step(self, position: int) -> int:
        """The position after one more step."""
        first = self.begin(position)
        after = first + self.step_samples
        return min(after, self._epoch_end(first)) if self.epoch_end == "pad" else self.begin(after)

    def end(self, position: int) -> int:
        """The position after the last step of the epoch of the next step."""
        first = self.begin(position)
        last = self._epoch_end(first)
        if self.epoch_end == "carry":
            return first + -(-(last - first) // self.step_samples) * self.step_samples
        return last

    def batches_between(self, first: int, position: int) -> int:
        """Batches of one rank from the begin of the step at `first` until the begin of the step at `position`, which
        is in the same epoch, or where that ends."""
        first = self.begin(first)
        if self.epoch_end == "drop" and position == self._epoch_end(first):
            return (position - first) // self.step_samples * self.accumulation
        return -(-(position - first) // self.round_samples)

    def batches(self, position: int) -> Iterator[list[Any]]:
        """The samples of this rank, a list for each batch, from `position` to the end of that epoch."""
        first = self.begin(position)
        last = self._epoch_end(first)
        whole = self.batches_between(first, self.end(first))
        rest = (last - first) % self.round_samples if self.epoch_end == "pad" else 0
        whole -= bool(rest)
        orders = _Orders(self)
        at_once = max(1, _COMPUTED_AT_ONCE // self.batch_size)
        for begin in range(0, whole, at_once):
            rounds = np.arange(begin, min(begin + at_once, whole), dtype=np.int64) * self.round_samples + first
            of_rank = rounds[:, None] + np.arange(self.batch_size, dtype=np.int64) + self.rank * self.batch_size
            yield from self._samples_at(of_rank, orders)
        if rest:
            share = -(-rest // self.num_replicas)
            of_rank = last - rest + self.rank * share + np.arange(share, dtype=np.int64)
            epoch_begin = last - self.samples
            yield from self._samples_at(epoch_begin + (of_rank[None] - epoch_begin) % self.samples, orders)

    def _samples_at(self, positions: Positions, orders: "_Orders") -> list[list[Any]]:
        """The samples of these batches, a row each."""
        samples: list[list[Any]] = orders.samples_at(positions).tolist()
        if not self.with_seeds:
            return samples
        seeds = numbers_at(positions, self.seed).tolist()
        return [list(zip(*batch, strict=True)) for batch in zip(samples, seeds, strict=True)]

    def _epoch_end(self, position: int) -> int:
        return (position // self.samples + 1) * self.samples


class _Orders:
    """The orders of the present epoch and of the next one."""

    def __init__(self, division: Division) -> None:
        self._samples, self._seed, self._shuffle = division.samples, division.seed, division.shuffle
        self._known: dict[int, Permutation] = {}

    def samples_at(self, positions: Positions) -> Positions:
        """The samples at these positions, which rise."""
        epochs, offsets = np.divmod(positions, self._samples)
        if not self._shuffle:
            return offsets
        first, last = int(epochs.flat[0]), int(epochs.flat[-1])
        if first == last:
            return self._order(first).samples_at(offsets)
        found = np.empty_like(offsets)
        for epoch in range(first, last + 1):
            inside = epochs == epoch
            found[inside] = self._order(epoch).samples_at(offsets[inside])
        return found

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._known:
            self._known = {known: order for known, order in self._known.items() if known == epoch - 1}
            self._known[epoch] = Permutation(self._samples, self._seed, epoch)
        return self._known[epoch]
