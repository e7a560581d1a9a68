"""Trains on gloo ranks, of which one flips a bit of its parameters. test_flipped_bit_gang.py runs it.

The job: {"flip_on", "flip_at", "steps"}. The running statistics of
BatchNorm differ from rank to rank, as they do in every such job; so do the samplers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks


class Cursor:
    """A sampler whose position differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.position = 1000 * rank

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def flip_a_bit(parameter: Any) -> None:
    """The lowest bit of one number: 1e-7 of its value."""
    bits = parameter.detach().view(torch.int32).view(-1)
    bits[bits.numel() // 2] ^= 1


def train(rank: int, job: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    cursor = Cursor(rank)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, cursor=cursor)
    step = checkpoint.restore()
    while step < job["steps"]:
        step += 1
        cursor.position += 1
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().sum()
        loss.backward()
        optimizer.step()
        if rank == job["flip_on"] and step == job["flip_at"]:
            flip_a_bit(net[3].weight)
        shown = torch.tensor(float("nan")) if rank == 1 and step >= 3 else loss
        checkpoint.step(step, final=step == job["steps"], loss=shown)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(train)
