"""`make bench-stragglers`: how soon a rank that becomes slower is named, whom a clean run names, and the cost of it.

    python -m benchmarks.bench_stragglers [--clean-steps N] [--virtual-steps N]

- Virtual gangs (`noisy_steps`): within how many steps a rank that is 30 % slower is named, at three strengths of noise,
  as median and 95th percentile, from the step 400 on and in a gang that has trained for 4000 steps; and how many false
  names there are in a million steps with heavy tails (2 % of the steps take 10 times as long), drift (3 % of each
  rank's pace, and half of that of all), and nodes that are slow in turn: for 20 to 60 steps, 1.2 to 1.6 times. They
  follow each other at once in one half of the runs, and after 200 steps on average in the other. Turns that come
  every 2000 steps are counted apart: a steady gang may name the first one.
- Eight gloo ranks train on this machine with steps of 50 ms, by its real clock. After the clean steps, one is 30 %
  slower. The step times go through the agent's blocks and the coordinator's judgement, as in a job.
- The cost is that of all calls and hooks in a step of 300 parameters, and that of a block of 10,000 ranks in the
  coordinator.

Needs PyTorch. The last line is a JSON object; names contain the units.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks import straggler_ranks
from benchmarks.straggler_ranks import STEP_S
from muster.checkpoint.store.block_times import STEPS_PER_BLOCK, StepBlocks
from muster.checkpoint.testing.rank_processes import start_ranks
from muster.checkpoint.training.rank_signals.step_timer import HostClock, StepTimer
from muster.daemon.coordinator.core.detection.straggler_evidence import follow
from muster.daemon.coordinator.core.state.block_times import BlockTime, RankPaces
from muster.simulator.world.noisy_steps import VirtualGang
from muster.v1.rank_pb2 import StepTime

RANKS, SLOW_RANK = 8, 5
SLOW_STEPS = 120
NOISES = (0.03, 0.1, 0.3, 0.6)
GANGS = ((2, 1), (4, 4), (8, 4), (64, 8))
"""Ranks, and ranks of each node, of the gangs in which one rank is slow."""
TROUBLED_GANGS = ((2, 1), (4, 1), (8, 4), (64, 8))
"""The same of the gangs in which nobody is: nodes in turn need two nodes."""
TRIALS, MOST_STEPS, SLOW_FROM = 100, 2000, 400
SETTLED_TRIALS, SETTLED_FROM = 20, 4000
"""The same in gangs that have trained for long."""
PAUSES, SELDOM = (0.0, 200.0), 2000.0
"""Mean steps between two turns."""
STEPS_OF_RUN = 10_000
MANY_RANKS = 10_000
PAIRS = 9
"""Runs with and without the timer, in turn."""
STEPS_OF_COST = 200


async def measure_ranks(clean_steps: int) -> list[list[StepTime]]:
    """The step times of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "slow_rank": SLOW_RANK,
            "slow_from": clean_steps + 1,
            "steps": clean_steps + SLOW_STEPS,
            "folder": folder,
        }
        log = Path(folder, "log")
        process = await start_ranks(Path(straggler_ranks.__file__), RANKS, {}, log, job)
        if await process.wait() != 0:
            sys.exit(f"a rank has failed:\n{log.read_text()}")
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return [[StepTime(step=step, compute_us=compute, wait_us=wait) for step, compute, wait in times] for times in found]


def whole_blocks(ranks: list[list[StepTime]]) -> Iterator[tuple[int, dict[int, BlockTime]]]:
    """Each block that all ranks have measured, by its number."""
    by_number: dict[int, dict[int, BlockTime]] = {}
    for rank, step_times in enumerate(ranks):
        blocks = StepBlocks()
        for step_time in step_times:
            blocks.add(step_time)
            if (times := blocks.times()) is not None:
                last = times.first_block + len(times.compute_us) - 1
                by_number.setdefault(last, {})[rank] = BlockTime(times.compute_us[-1], times.wait_us[-1])
    return ((number, block) for number, block in sorted(by_number.items()) if len(block) == len(ranks))


def judge(ranks: list[list[StepTime]], clean_steps: int) -> dict[str, int | None]:
    """Whom the coordinator names, and when."""
    paces, named_clean = RankPaces(), set()
    for number, block in whole_blocks(ranks):
        last_step = STEPS_PER_BLOCK * (number + 1)
        follow(paces, block, RANKS, last_step * STEP_S)
        named = set(paces.stragglers)
        if last_step <= clean_steps:
            named_clean |= named
        elif SLOW_RANK in named:
            return {"named_after_steps": last_step - clean_steps, "named_in_clean_steps": len(named_clean)}
    return {"named_after_steps": None, "named_in_clean_steps": len(named_clean)}


def delays(name: str, trials: int, slow_from: int) -> dict[str, str]:
    """In how many steps a slow rank is named: median and 95th percentile."""
    found = {}
    for (ranks, on_node), noise in itertools.product(GANGS, NOISES):
        gang = VirtualGang(ranks, on_node, noise, slow_ranks=(ranks - 1,), slow_from=slow_from)
        fewer = trials if ranks < 64 else trials // 5
        steps = sorted(gang.steps_until_named(seed, MOST_STEPS) for seed in range(fewer))
        found[f"{name}_of_{ranks}_ranks_noise_{noise:.0%}"] = f"{steps[fewer // 2]}, {steps[fewer * 95 // 100]}"
    return found


def false_names(steps: int) -> dict[str, int]:
    """How many false names there are in so many steps, a share of them at each size, noise and pause."""
    runs = max(1, steps // (STEPS_OF_RUN * len(TROUBLED_GANGS) * len(NOISES) * len(PAUSES)))
    return {
        f"false_names_noise_{noise:.0%}": sum(
            VirtualGang(ranks, on_node, noise, troubled=True, pause_steps=pause).false_names(seed, STEPS_OF_RUN)
            for ranks, on_node in TROUBLED_GANGS
            for pause in PAUSES
            for seed in range(runs)
        )
        for noise in NOISES
    }


def names_of_seldom_turns() -> int:
    """How many of some generations with little noise name a node that is seldom slow, for some tens of steps."""
    gang = VirtualGang(2, 1, NOISES[0], troubled=True, pause_steps=SELDOM)
    return sum(gang.false_names(seed, STEPS_OF_RUN) > 0 for seed in range(SETTLED_TRIALS))


def block_ms() -> float:
    """Milliseconds of the coordinator for a block of many ranks: the median."""
    paces, spent = RankPaces(), []
    for number in range(PAIRS):
        block = {rank: BlockTime(50_000 + 97 * (rank * (number + 7) % 101), 1000) for rank in range(MANY_RANKS)}
        begin = time.perf_counter()
        follow(paces, block, RANKS, float(number))
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent) * 1e3


def cost_us() -> tuple[float, float]:
    """Microseconds of a step without and with the timer: medians of pairs."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    pairs = []
    for _ in range(PAIRS):
        plain = _median_step_us(model, optimizer, None)
        timer = StepTimer(model.parameters(), [optimizer], HostClock())
        pairs.append((plain, _median_step_us(model, optimizer, timer)))
        timer.close()
    plain_us = statistics.median(plain for plain, _ in pairs)
    return plain_us, plain_us + statistics.median(timed - plain for plain, timed in pairs)


def _median_step_us(model: nn.Module, optimizer: torch.optim.Optimizer, timer: StepTimer | None) -> float:
    spent = []
    for step in range(1, STEPS_OF_COST + 1):
        begin = time.perf_counter()
        if timer is not None:
            timer.begin_step()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        if timer is not None:
            timer.end_step(step)
            timer.measured()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent) * 1e6


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean-steps", type=int, default=2000)
    parser.add_argument("--virtual-steps", type=int, default=1_000_000)
    options = parser.parse_args()
    clean_steps = options.clean_steps
    plain_us, timed_us = cost_us()
    ranks = asyncio.run(measure_ranks(clean_steps))
    percent = 100 * (timed_us - plain_us) / (STEP_S * 1e6)
    figures = {
        **judge(ranks, clean_steps),
        "clean_steps": clean_steps,
        **delays("named_steps", TRIALS, SLOW_FROM),
        **delays("settled_named_steps", SETTLED_TRIALS, SETTLED_FROM),
        "virtual_steps": options.virtual_steps,
        **false_names(options.virtual_steps),
        f"generations_of_{SETTLED_TRIALS}_that_name_a_seldom_turn": names_of_seldom_turns(),
        "block_of_10000_ranks_ms": round(block_ms(), 1),
        "step_us": round(plain_us, 1),
        "timed_step_us": round(timed_us, 1),
        "percent_of_50_ms": round(percent, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
