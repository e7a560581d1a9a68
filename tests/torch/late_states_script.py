"""A training script in which some states appear late, on some ranks only. test_late_states_gang.py runs it.

The job: {"steps", "out", "tokens": by rank, the first step in which each of its experts is given tokens, "frozen": the
step after which rank 0 trains a layer that was frozen until then; 0: none is, "again": a folder to restore from as
well}. Each rank writes its parameters and their optimizer states, before its first step and after its last one, to
out/RANK.pt.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

WIDTH = 8


class Net(nn.Module):
    """A layer that all ranks share, a layer of each rank's own, and experts."""

    def __init__(self, experts: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(seed)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x: Any, used: list[int]) -> Any:
        x = self.adapter(torch.tanh(self.shared(x)))
        return sum((self.experts[number](x) for number in used), start=x)


def states_by_name(net: Net, optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        found[name] = parameter.detach().clone()
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first_tokens = job["tokens"][rank]
    thaws_at = job["frozen"] if rank == 0 else 0

    def made() -> tuple[Net, Any, Checkpoint]:
        net = Net(len(first_tokens), 10 + rank)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        differs_in = {"model.experts": None, "model.adapter": None}
        return net, optimizer, Checkpoint(model=net, optimizer=optimizer, differs_in=differs_in)

    net, optimizer, checkpoint = made()
    done = checkpoint.restore()
    before, again = states_by_name(net, optimizer), None
    if job.get("again"):
        del os.environ["MUSTER_AGENT_FD"]
        other, its_optimizer, from_folder = made()
        assert from_folder.restore(durable=job["again"]) == done
        again = states_by_name(other, its_optimizer)
    net.adapter.requires_grad_(done >= thaws_at)
    while done < job["steps"]:
        used = [number for number, first in enumerate(first_tokens) if done + 1 >= first]
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(done))
        optimizer.zero_grad()
        net(x, used).square().mean().backward()
        for parameter in net.shared.parameters():  # so that no rank finishes a step without all others
            dist.all_reduce(parameter.grad)
        optimizer.step()
        done += 1
        net.adapter.requires_grad_(done >= thaws_at)
        checkpoint.step(done, final=done == job["steps"])
    after = states_by_name(net, optimizer)
    torch.save({"before": before, "again": again, "after": after}, Path(job["out"], f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    run_ranks(train)
