"""Many seeds in several processes: a number of seeds, or as many as fit into a time."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from muster.daemon.host import clock
from muster.simulator import seeds
from muster.simulator.coverage.counts import Coverage

SEEDS_PER_TASK = 20
"""Seeds that one process runs before it returns their results."""
MAX_FAILURES = 50
"""After this many failed seeds no further seeds are started."""


@dataclass(slots=True)
class Outcome:
    """The result of many seeds.

    `count`: how many seeds were run. `failures`: the results of the seeds that violated an invariant. `seconds`:
    wall-clock time.
    """

    count: int = 0
    seconds: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)
    failures: list[seeds.Result] = field(default_factory=list)

    def add(self, results: list[seeds.Result]) -> None:
        """Add the results of some seeds."""
        self.count += len(results)
        for result in results:
            self.coverage.merge(result.coverage)
        self.failures += [result for result in results if result.violation]

    def report(self) -> list[str]:
        """The coverage table, and the transcripts of failed seeds."""
        lines = self.coverage.table(self.count)
        lines.append(f"{self.count / max(self.seconds, 1e-9):.0f} seeds per second, {self.seconds:.1f} s")
        for failure in self.failures[:3]:
            lines += ["", f"seed {failure.seed}: {failure.violation}", *failure.transcript]
        if self.failures:
            numbers = ", ".join(str(failure.seed) for failure in self.failures)
            lines += ["", f"{len(self.failures)} seeds failed: {numbers}", "run one of them again: make sim SEED=..."]
        return lines


def run(first: int, count: int | None = None, seconds: float | None = None, processes: int | None = None) -> Outcome:
    """Run seeds from `first` on, until `count` seeds are done or `seconds` have passed.

    Args:
        processes: how many processes work at once. None: one for each processor.
    """
    outcome, began_at = Outcome(), clock.monotonic()
    workers = processes or os.cpu_count() or 1
    tasks = _ranges(first, count, seconds, began_at)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _initialize_worker) as pool:
        pending = {pool.submit(_run_seeds, numbers) for numbers in itertools.islice(tasks, 2 * workers)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                outcome.add(future.result())
            if len(outcome.failures) < MAX_FAILURES:
                pending |= {pool.submit(_run_seeds, numbers) for numbers in itertools.islice(tasks, len(done))}
    outcome.seconds = clock.monotonic() - began_at
    return outcome


def _ranges(first: int, count: int | None, seconds: float | None, began_at: float) -> Iterator[range]:
    start = first
    while count is None or start < first + count:
        if seconds is not None and clock.monotonic() - began_at > seconds:
            return
        end = start + SEEDS_PER_TASK if count is None else min(start + SEEDS_PER_TASK, first + count)
        yield range(start, end)
        start = end


def _initialize_worker() -> None:
    logging.disable(logging.CRITICAL)  # the transcript shows what the parts would log
    gc.freeze()  # a run leaves few reference cycles: collecting them took a sixth of the time (measured)
    gc.set_threshold(50_000, 20, 20)


def _run_seeds(numbers: range) -> list[seeds.Result]:
    return [seeds.run(seed) for seed in numbers]
