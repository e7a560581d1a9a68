"""By how much a step becomes longer that says its loss and other numbers.

A step takes a millisecond, and a call of `muster.log` a thousandth of it. The difference of two whole steps can't show
that: it is 0.1 % to 0.3 % off where others use the machine. So the time of the call itself is measured, in steps that
leave nothing of it in the caches of the processor, as a training does.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator

import muster
from muster.checkpoint.training.rank_signals.reported_numbers import INTERVAL_S, ReportedNumbers

STEP_S = 1e-3
"""Seconds of a step of the benchmark: far shorter than that of any large model."""
BATCHES, ROUNDS = 9, 300
"""Batches, each with a figure of its own, and rounds of a batch. A round has a step of each kind, in any order."""
CACHE_BYTES = 1 << 21
"""Of a copy in each step: as large as the caches that belong to one core."""


class Step:
    """The work of a step: half of it in Python, the rest copies memory."""

    def __init__(self) -> None:
        self._memory, self._rounds = bytearray(CACHE_BYTES), 1000
        for _ in range(3):
            began = time.thread_time()
            self()
            self._rounds = int(self._rounds * STEP_S / (time.thread_time() - began))

    def __call__(self) -> None:
        """Work."""
        total = 0
        for number in range(self._rounds):
            total += number * number
        bytearray(self._memory)


def call_ns(call: Callable[[int], None], step: int) -> int:
    """Nanoseconds of one call. Those of the clock are in it."""
    began = time.perf_counter_ns()
    call(step)
    return time.perf_counter_ns() - began


def says_nothing(step: int) -> None:
    """A step without numbers."""


def says(step: int) -> None:
    """A step with numbers, which are seldom written."""
    muster.log(step, loss=2.5, gradient_norm=1.5, tokens=4096, lr=1e-4)


def batch_percent(work: Step, kinds: dict[str, Callable[[int], None]], steps: Iterator[int]) -> float:
    """By how much the steps of one batch are longer."""
    spent: dict[str, list[int]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name in random.sample(list(kinds), len(kinds)):
            work()
            spent[name].append(call_ns(kinds[name], next(steps)))
    nothing, said, written = (statistics.median(spent[name]) for name in ("nothing", "says", "writes"))
    return 100 * ((said - nothing) / 1e9 / STEP_S + (written - nothing) / 1e9 / INTERVAL_S)


def log_overhead() -> dict[str, float]:
    """log_overhead_percent: by how much steps of 1 ms become longer when each says four numbers: the median of batches,
    each with the medians of its steps. The half of the batches is log_overhead_noise_percent apart. The least of them
    says what neighbours on this machine add.
    """
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ["MUSTER_AGENT_FD"] = str(rank.fileno())
    muster.log(total_steps=1 << 40)
    ticks = iter(range(1 << 62))
    always_due = ReportedNumbers(lambda page: True, now=lambda: float(next(ticks)))

    def writes(step: int) -> None:
        always_due.note(step, {"loss": 2.5, "gradient_norm": 1.5, "tokens": 4096, "lr": 1e-4})

    work, steps = Step(), iter(range(1, 1 << 62))
    kinds: dict[str, Callable[[int], None]] = {"nothing": says_nothing, "says": says, "writes": writes}
    found = [batch_percent(work, kinds, steps) for _ in range(BATCHES)]
    low, middle, high = statistics.quantiles(found, n=4)
    agent.close()
    rank.close()
    return {
        "log_overhead_percent": middle,
        "log_overhead_noise_percent": high - low,
        "log_overhead_least_percent": min(found),
    }
