"""Trains on gloo ranks of which one becomes 30 % slower, with the library's lines. test_straggler_gang.py runs it.

The job: {"slow_rank", "slow_from", "steps", "block"}. The ranks measure
their steps by a time that the script makes, because a busy machine makes any rank slow. Before each block of `block`
steps, rank 0 reads one byte from the standard input: the test says how far the gang may go.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

STEP_S, SLOWER_BY = 0.05, 0.3


class SimulatedTime:
    """The time of one rank, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_for_all(self) -> None:
        """All ranks go on when the last one has come."""
        latest = torch.tensor(self.now, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        self.now = float(latest)


def train(rank: int, job: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time = SimulatedTime()
    checkpoint = Checkpoint(model=model, optimizer=optimizer, host_time=lambda: time.now)
    step = checkpoint.restore()
    while step < job["steps"]:
        if rank == 0 and step % job["block"] == 0:
            sys.stdin.buffer.read(1)
        step += 1
        slow = rank == job["slow_rank"] and step >= job["slow_from"]
        time.now += STEP_S * (1 + SLOWER_BY) if slow else STEP_S
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        time.wait_for_all()
        optimizer.step()
        checkpoint.step(step, final=step == job["steps"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(train)
