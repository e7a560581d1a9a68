"""Trains on gloo ranks of which one becomes slower, and writes the times of each step. bench_stragglers.py runs it.

The job: {"slow_rank", "slow_from": the step from which on it is slow, "steps", "folder": for one JSON file for each
rank, a list of [step, microseconds of compute, microseconds of wait]}. Sleep stands in for compute.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint.testing.rank_processes import run_ranks
from muster.checkpoint.training.rank_signals.step_timer import HostClock, StepTimer

STEP_S, SLOWER_BY = 0.05, 0.3


def train(rank: int, job: dict[str, Any]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer.of_states([model, optimizer], HostClock())
    assert timer is not None
    times = []
    for step in range(1, job["steps"] + 1):
        timer.begin_step()
        slow = rank == job["slow_rank"] and step >= job["slow_from"]
        time.sleep(STEP_S * (1 + SLOWER_BY) if slow else STEP_S)
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        timer.end_step(step)
        times += [(found.step, found.compute_us, found.wait_us) for found in timer.measured()]
    dist.barrier()
    dist.destroy_process_group()
    Path(job["folder"], str(rank)).write_text(json.dumps(times))


if __name__ == "__main__":
    run_ranks(train)
