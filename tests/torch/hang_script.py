"""Trains on gloo ranks of which one hangs after some steps, with the library's lines. test_hang_gang.py runs it.

The job: {"hanging_rank", "hang_after", "hang": a function of this module}.
"""

import ctypes
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

STEP_S = 0.05
PR_SET_PDEATHSIG = 1


def keep_gil_for_ever() -> None:
    while True:
        ctypes.PyDLL(None).sleep(3600)  # a signal ends the sleep


def read_for_ever() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpoint(model=model, optimizer=optimizer)
    step = checkpoint.restore()
    while True:
        step += 1
        if rank == job["hanging_rank"] and step > job["hang_after"]:
            {"keep_gil_for_ever": keep_gil_for_ever, "read_for_ever": read_for_ever}[job["hang"]]()
        time.sleep(STEP_S)
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        checkpoint.step(step)


if __name__ == "__main__":
    run_ranks(train)
