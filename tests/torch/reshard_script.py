"""A training script whose checkpoint another layout of the same model goes on from. test_reshard_gang.py runs it.

The job: {"steps", "mode": "ddp" | "fsdp" | "tp" | "hsdp" | "fsdp_tp", "out", "durable"}. Rank 0 writes the whole model
and the whole state of the optimizer, as one process without any parallelism would hold them, to out/full.pt: before the
first step of this run, and after its last.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks


class Net(nn.Module):
    """Two matrices for tensor parallelism; sizes that no number of ranks divides, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.wide = nn.Linear(24, 96)
        self.narrow = nn.Linear(96, 24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.narrow(torch.relu(self.wide(self.embed(tokens)))))


def wrapped(net: Net, mode: str) -> Any:
    world = dist.get_world_size()
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if mode == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return parallelize_module(net, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    if mode == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(net, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["shard"])
    if mode == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net.wide, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(state: Any) -> Any:
    """The same nested state without DTensors. A collective call."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return state.full_tensor().clone()
    return state.clone() if isinstance(state, torch.Tensor) else state


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = wrapped(Net(), job["mode"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler)

    def full() -> dict[str, Any]:
        plain = model.module if job["mode"] == "ddp" else model
        return {
            "model": whole(plain.state_dict()),
            "moments": whole(optimizer.state_dict()["state"]),
            "rate": scheduler.get_last_lr(),
        }

    done = checkpoint.restore(durable=job.get("durable") or None)
    before = full()
    while done < job["steps"]:
        optimizer.zero_grad()
        tokens = torch.arange(32) * (done + 1) % 37
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        scheduler.step()
        done += 1
        checkpoint.step(done, final=done == job["steps"])
    after = full()
    if rank == 0:
        torch.save({"before": before, "after": after}, Path(job["out"], "full.pt"))
    Path(job["out"], str(rank)).write_text(str(done))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    run_ranks(train)
