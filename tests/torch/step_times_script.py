"""Trains on gloo ranks of which one is 30 % slower, and writes what each rank measures. test_step_times.py runs it.

argv: the number of ranks, the slow rank, the folder for one JSON file for each rank. Sleep stands in for compute.
"""

import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint.store.block_times import StepBlocks
from muster.checkpoint.training.step_timer import StepTimer

STEP_S, SLOWER_BY, STEPS = 0.05, 0.3, 24


def train(rank: int, slow_rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer.of_states([model, optimizer])
    assert timer is not None
    blocks, walls = StepBlocks(), []
    for step in range(1, STEPS + 1):
        begin = time.monotonic()
        timer.begin_step()
        time.sleep(STEP_S * (1 + SLOWER_BY) if rank == slow_rank else STEP_S)
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        timer.end_step(step)
        for step_time in timer.measured():
            blocks.add(step_time)
        walls.append(time.monotonic() - begin)
    times = blocks.times()
    assert times is not None
    found = {
        "wall_s": statistics.median(walls),
        "first_block": times.first_block,
        "compute_us": list(times.compute_us),
        "wait_us": list(times.wait_us),
    }
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    ranks, slow_rank = int(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(ranks))
    children = []
    for rank in range(ranks):
        os.environ["RANK"] = str(rank)
        pid = os.fork()
        if pid == 0:
            train(rank, slow_rank, sys.argv[3])
            os._exit(0)
        children.append(pid)
    sys.exit(max(os.waitpid(pid, 0)[1] != 0 for pid in children))


if __name__ == "__main__":
    main()
