"""The order of an epoch: a permutation of the samples that is a pure function of the number of samples, seed and epoch.
And a random number for each sample of each epoch.

Two ways, by the number of samples:

- Up to 65,536: sorted by a random number for each sample. Every order is equally likely. It takes half a megabyte.
- More: a generalized Feistel cipher with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
  2002, method 3). Each position is computed by itself, so a billion samples need no more memory than ten, and a
  restored run looks up the middle of an epoch as fast as its begin. torch.randperm would take 8 GB and half a minute
  in each rank.

The bits are mixed by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
written out here: torch and numpy do not promise that another version draws the same permutation, and a kept position
counts for as long as the checkpoint. A change of anything in this module needs a new ORDER_VERSION.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
"""Kept with each position: a position means something in the order of its version only."""

MOST_SAMPLES = 1 << 48
"""A position, which counts over all epochs, fits into 63 bits for 32,768 epochs of so many samples."""

MOST_SORTED_SAMPLES = 1 << 16
"""Up to so many samples, an epoch is sorted: 10 ms, and half a megabyte for as long as the epoch lasts."""

_ROUNDS = 6
"""Of the Feistel cipher, for both halves together. Four make a pseudorandom permutation of good random functions
(Luby and Rackoff); two more cost little."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""SplitMix64's step: the odd number nearest to 2^64 over the golden ratio."""

Positions = NDArray[np.int64]
"""Places in an epoch's order, or samples: integers from 0 to less than the number of samples."""

_Words = NDArray[np.uint64]


class Permutation:
    """The order of one epoch.

    Args:
        samples: how many there are, 1 to MOST_SAMPLES.
        seed: 0 to 2^64 - 1.
        epoch: counted from 0.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._samples = samples
        self._keys = _keys(seed, epoch, _ROUNDS)
        self._sorted: Positions | None = None
        if samples <= MOST_SORTED_SAMPLES:
            numbers = _mix(np.arange(samples, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA) + self._keys[0])
            self._sorted = np.argsort(numbers, kind="stable").astype(np.int64)
        self._rows = isqrt(samples - 1) + 1
        self._columns = -(-samples // self._rows)

    def samples_at(self, positions: Positions) -> Positions:
        """The samples at these positions of the order, an array of the same shape."""
        if self._sorted is not None:
            return self._sorted[positions]
        found = self._encrypted(positions.astype(np.uint64))
        # The cipher permutes a table that has a few places more than there are samples: whoever lands there goes on.
        while (outside := found >= self._samples).any():
            found[outside] = self._encrypted(found[outside])
        return found.astype(np.int64)

    def _encrypted(self, places: _Words) -> _Words:
        """The places of a table of rows and columns, permuted: each round shifts a row by a number that follows from
        its column, or the other way around."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = places // columns, places % columns
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _below(rows, _mix(column + even))) % rows
            column = (column + _below(columns, _mix(row + odd))) % columns
        return row * columns + column


def numbers_at(positions: Positions, seed: int) -> Positions:
    """A random number of 63 bits for each position, which follows from it and from the seed. They count over epochs."""
    key = _keys(seed ^ _GOLDEN_GAMMA, 0, 1)  # other numbers than those that orders are made of
    return (_mix(positions.astype(np.uint64) * np.uint64(_GOLDEN_GAMMA) + key) >> np.uint64(1)).astype(np.int64)


def _keys(seed: int, epoch: int, count: int) -> _Words:
    """Random numbers that follow from seed and epoch."""
    state = np.array([seed], dtype=np.uint64)
    for part in (0, epoch):
        state = _mix(state + np.uint64(_GOLDEN_GAMMA)) + np.uint64(part)
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return _mix(_mix(state) + numbers * np.uint64(_GOLDEN_GAMMA))


def _mix(words: _Words) -> _Words:
    """SplitMix64's last part: a bijection of 64 bits in which each bit of the input changes half of the output."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _below(limit: np.uint64, words: _Words) -> _Words:
    """Random words as numbers from 0 to less than `limit`, of 32 bits at most."""
    return ((words >> np.uint64(32)) * limit) >> np.uint64(32)
