"""Trains on gloo ranks of which one becomes 30 % slower, with the library's lines. test_straggler_gang.py runs it.

argv: JSON {"ranks": {rank: descriptor}, "generation", "slow_rank", "slow_from", "steps"}. Sleep stands in for compute.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint

STEP_S, SLOWER_BY = 0.05, 0.3


def train(rank: int, job: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpoint(model=model, optimizer=optimizer)
    step = checkpoint.restore()
    while step < job["steps"]:
        step += 1
        slow = rank == job["slow_rank"] and step >= job["slow_from"]
        time.sleep(STEP_S * (1 + SLOWER_BY) if slow else STEP_S)
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        checkpoint.step(step, final=step == job["steps"])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.update(WORLD_SIZE=str(len(job["ranks"])), MUSTER_GENERATION=str(job["generation"]))
    children = []
    for rank, descriptor in job["ranks"].items():
        os.environ.update(RANK=rank, MUSTER_AGENT_FD=str(descriptor))
        pid = os.fork()
        if pid == 0:
            for other in job["ranks"].values():
                if other > descriptor:
                    os.close(other)
            train(int(rank), job)
            os._exit(0)
        children.append(pid)
        os.close(descriptor)
    sys.exit(max(os.waitpid(pid, 0)[1] != 0 for pid in children))


if __name__ == "__main__":
    main()
