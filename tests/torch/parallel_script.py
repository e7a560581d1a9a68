"""A training script whose ranks hold different states. test_parallel_gang.py runs it.

The job: {"steps", "out", "durable", "again": a folder to restore from as well, "pipeline": stages, "experts": ranks
over which the experts of a layer are spread, "zero": whether ZeRO-1 shards the optimizer's state, "declared": whether
differs_in names the experts}. The ranks of a stage are data-parallel replicas (DDP) in all but the experts. Each rank
writes its state before its first step, and after its last one, to out/RANK.pt, by the names of its parameters.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

LAYERS, WIDTH = 4, 8


class Layer(nn.Module):
    """A matrix that all replicas share, and an expert of this rank's own. Both have the same names in all stages."""

    def __init__(self, number: int, expert: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.shared = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(100 * expert + number)
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.expert(torch.tanh(self.shared(x)))


class Stage(nn.Module):
    """Some of the layers. They keep the numbers that they have in the whole model."""

    def __init__(self, numbers: range, expert: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(number, expert) for number in numbers})

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x


def train_one_step(model: Any, stage: int, stages: int, group: Any, x: Any) -> None:
    """One pass forward and backward through a pipeline without any overlap."""
    ranks = dist.get_process_group_ranks(group)
    if stage > 0:
        dist.recv(x, ranks[stage - 1])
        x.requires_grad_()
    out = model(x)
    if stage < stages - 1:
        gradient = torch.empty_like(out)
        dist.send(out.detach(), ranks[stage + 1])
        dist.recv(gradient, ranks[stage + 1])
        out.backward(gradient)
    else:
        out.square().mean().backward()
    if stage > 0:
        dist.send(x.grad, ranks[stage - 1])


def states_by_name(model: nn.Module, *optimizers: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        for optimizer in optimizers:
            own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
            found |= {f"{name}.{key}": value.clone() for key, value in own.state.get(parameter, {}).items()}
    return found


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages, spread = job["pipeline"], job["experts"]
    shape = (stages, dist.get_world_size() // stages // spread, spread)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "replicas", "experts"))
    stage, expert = mesh.get_local_rank("pipeline"), mesh.get_local_rank("experts")
    same_stage = [dist.new_group(ranks) for ranks in mesh.mesh.reshape(stages, -1).tolist()][stage]
    layers = LAYERS // stages
    plain = Stage(range(stage * layers, (stage + 1) * layers), expert)
    if spread > 1:
        ignored = [name for name, _ in plain.named_parameters() if ".expert." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ignored)
    model = DistributedDataParallel(plain, process_group=same_stage)
    own = [p for name, p in plain.named_parameters() if ".expert." in name and spread > 1]
    common = [p for name, p in plain.named_parameters() if ".expert." not in name or spread == 1]
    optimizer: Any = torch.optim.AdamW([{"params": common[:1], "lr": 0.02}, {"params": common[1:]}], lr=0.01)
    if job["zero"]:
        optimizer = ZeroRedundancyOptimizer(common, torch.optim.AdamW, process_group=same_stage, lr=0.01)
    optimizers = {"optimizer": optimizer}
    if own:
        optimizers["expert_optimizer"] = torch.optim.AdamW(own, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    differs_in = {"model.layers.*.expert": mesh["experts"]} if job.get("declared", spread > 1) else None
    checkpoint = Checkpoint(model=model, **optimizers, scheduler=scheduler, differs_in=differs_in)
    done = checkpoint.restore(durable=job.get("durable") or None)
    before = states_by_name(plain, *optimizers.values())
    again = None
    if job.get("again"):
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
        del os.environ["MUSTER_AGENT_FD"]
        other = Checkpoint(model=model, **optimizers, scheduler=scheduler, differs_in=differs_in)
        assert other.restore(durable=job["again"]) == done
        again = states_by_name(plain, *optimizers.values())
    while done < job["steps"]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * done + expert))
        train_one_step(model, stage, stages, mesh.get_group("pipeline"), x)
        for each in optimizers.values():
            each.step()
        plain.zero_grad()
        scheduler.step()
        done += 1
        checkpoint.step(done, final=done == job["steps"])
    after = states_by_name(plain, *optimizers.values())
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.save({"before": before, "after": after, "again": again, "rates": rates}, Path(job["out"], f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    run_ranks(train)
