"""Whether finished steps and the batches that a loader was given fit together.

A sampler counts what finished steps have read. A loader with workers takes batches long before: it fetches ahead. So a
script whose steps read more or fewer batches than the sampler was told would go on at a wrong sample after a restore. A
loader shows it: it takes one more batch for each that the script takes, so that it is always equally far ahead of the
finished steps.
"""

from collections.abc import Iterator
from typing import Any

from muster.checkpoint.data.division import Division


class HandedOut:
    """The batches of one epoch, or of the rest of one, on their way to a loader. An iterator of them.

    Args:
        division: how samples are divided.
        position: the finished steps' own, where the first batch begins.
    """

    def __init__(self, division: Division, position: int) -> None:
        self._division = division
        self._position = division.begin(position)
        self._end = division.end(position)
        self._batches = division.batches(position)
        self._count = 0
        self._has_ended = False
        self._lead: int | None = None
        """Batches by which the loader was ahead at the first finished step."""

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        for batch in self._batches:
            self._count += 1
            return batch
        self._has_ended = True
        raise StopIteration

    def problem(self, position: int) -> str:
        """Why the steps up to `position` can't have read these batches and no others; empty: they can.

        Call it after each step: what counts is whether the loader's lead grows.
        """
        counted = self._division.batches_between(self._position, min(position, self._end))
        lead = self._count - counted
        a_step = f"{self._division.accumulation} batches of {self._division.batch_size} samples"
        if lead < 0 or position > self._end:
            return (
                f"the sampler counts {a_step} for a step, and the steps since this epoch's iterator was made have read "
                f"fewer ({self._count} batches at most): give the sampler the batch_size of the loader and the "
                "accumulation of a step, and let the loader use this sampler"
            )
        if self._has_ended:
            return ""  # a loader that has all batches is no longer equally far ahead
        if self._lead is None:
            self._lead = lead
        if lead <= self._lead:
            return ""
        return (
            f"the last step has read {lead - self._lead} batches more than the sampler counts for it ({a_step}): give "
            "the sampler the batch_size of the loader and the accumulation of a step; after batches that make no step, "
            "call the sampler's finish_steps()"
        )
