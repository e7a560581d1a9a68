"""A training script as a user writes it; all ranks are forks of one process. test_checkpoint_gang.py runs it.

The job: {"steps", "mode": "ddp" | "fsdp", "device": "cpu" | "cuda", "out", "durable", "every"}. All ranks share the
first GPU. Each rank writes the digest of its whole state after the last step to out/RANK; rank 0 writes the model to
out/model.pt.
"""

import hashlib
import io
import logging
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks


class Net(nn.Module):
    """Tied weights, several buckets, a buffer, dropout; the order of registration is not the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 500, bias=False)
        self.third = nn.Linear(256, 64)
        self.first = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.second = nn.Linear(256, 256)
        self.embed = nn.Embedding(500, 64)
        self.embed.weight = self.head.weight

    def forward(self, tokens: Any) -> Any:
        x = torch.relu(self.first(self.embed(tokens)))
        x = self.norm(x) if self.norm is not None else x
        x = nn.functional.dropout(torch.relu(self.second(x)), 0.1)
        return self.head(self.third(x))


class Cursor:
    """A sampler with a position, and with objects that grow."""

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)
        self.drawn: list[int] = []

    def batch(self) -> Any:
        self.drawn += [self.random.randrange(500) for _ in range(32)]
        return torch.tensor(self.drawn[-32:])

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.drawn = list(state["drawn"])


def wrapped(net: Net, mode: str, device: str) -> Any:
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.1)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (net.first, net.second, net.third):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it if algorithms are deterministic
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = Net()
    if job["mode"] == "fsdp":
        net.norm = None
    device = job["device"]
    model = wrapped(net.to(device), job["mode"], device)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=job["mode"] == "ddp")
    cursor = Cursor(rank)

    def loss_of(tokens: Any) -> Any:
        tokens = tokens.to(device)
        return nn.functional.cross_entropy(model(tokens), tokens.roll(1))

    checkpoint = Checkpoint(model=model, optimizer=optimizer, cursor=cursor, every=job["every"])
    done = checkpoint.restore(warmup=lambda: loss_of(torch.arange(32)).backward(), durable=job.get("durable") or None)
    while done < job["steps"]:
        optimizer.zero_grad()
        loss_of(cursor.batch()).backward()
        optimizer.step()
        random.random()
        done += 1
        if not checkpoint.step(done, final=done == job["steps"]):
            break
    file = io.BytesIO()
    local = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in model.state_dict().items()}
    moments = {
        n: {k: v.to_local() if hasattr(v, "to_local") else v for k, v in s.items()}
        for n, s in optimizer.state_dict()["state"].items()
    }
    generators = [torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None, random.getstate()]
    torch.save([dict(local), moments, cursor.state_dict(), generators, done], file)
    Path(job["out"], str(rank)).write_text(hashlib.sha256(file.getvalue()).hexdigest() + f" {done}")
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save({k.removeprefix("module."): v for k, v in full.items()}, Path(job["out"], "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    run_ranks(train)
