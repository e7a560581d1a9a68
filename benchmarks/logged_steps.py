"""By how much a step becomes longer that says its loss and other numbers."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable

from muster.checkpoint.store.rank_samples import RankSamples
from muster.checkpoint.training.rank_signals.reported_numbers import ReportedNumbers, send_page

STEP_S = 1e-3
"""Seconds of a step of the benchmark: far shorter than that of any large model."""
BLOCK_STEPS, PAIRS = 200, 100
"""Steps of a block, in which pages are written twice, and pairs of blocks."""
SAMPLE_S = 2.0
"""Seconds between two samples of an agent."""


def work(rounds: int) -> int:
    """A step of a training."""
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def rounds_of(seconds: float) -> int:
    """Rounds of `work` in so many seconds of this thread's processor time."""
    began = time.thread_time()
    work(1_000_000)
    return int(1_000_000 * seconds / (time.thread_time() - began))


def block_s(rounds: int, after_step: Callable[[int], None]) -> float:
    """Processor time of a block: neighbours on this machine don't count."""
    began = time.thread_time()
    for step in range(BLOCK_STEPS):
        work(rounds)
        after_step(step)
    return time.thread_time() - began


def log_overhead() -> dict[str, float]:
    """By how much steps of 1 ms become slower when each says four numbers, with an agent that samples them meanwhile.
    Blocks with and without take turns, and so does which of a pair is first."""
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    samples = RankSamples(lambda *_: None)
    numbers = ReportedNumbers(lambda page: send_page(rank, page))
    _, pages, _, _ = socket.recv_fds(agent, 1 << 12, 1)
    samples.add_page(0, pages[0])
    ended = threading.Event()
    sampler = threading.Thread(target=lambda: [samples.take() for _ in iter(lambda: ended.wait(SAMPLE_S), True)])
    sampler.start()
    steps = iter(range(1, 1 << 62))

    def says(_: int) -> None:
        step = next(steps)
        numbers.note(step, {"loss": 2.5, "gradient_norm": 1.5, "tokens": 4096, "lr": 1e-4})

    def says_nothing(_: int) -> None:
        next(steps)

    rounds, ratios = rounds_of(STEP_S), []
    for pair in range(PAIRS):
        order = (says, says_nothing) if pair % 2 else (says_nothing, says)
        spent = {kind: block_s(rounds, kind) for kind in order}
        ratios.append(spent[says] / spent[says_nothing] - 1)
    ended.set()
    sampler.join()
    samples.close()
    began = time.thread_time()
    for step in range(200_000):
        says(step)
    return {
        "log_overhead_percent": statistics.median(ratios) * 100,
        "log_call_us": (time.thread_time() - began) / 200_000 * 1e6,
    }
