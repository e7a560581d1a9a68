"""A training script whose ranks hold different DTensors: stages of a pipeline, and experts. test_mesh_layouts_gang.py
runs it.

The job: {"steps", "layout", "out", "durable", "again": a folder to restore from as well}. Layouts:

- "pp_fsdp": stages of two ranks each, FSDP2 in each stage. "pp_tp": tensor parallelism in each stage.
- "fsdp": FSDP2 over all ranks, one stage.
- "declared": each rank's experts of its own, FSDP2 over the ranks with the same experts; differs_in names them.
- "ep_fsdp": experts as DTensors over the expert-parallel ranks, and FSDP2 over the others, as torchtitan lays them.

Each rank writes its whole tensors, and those of its optimizer, by name: before its first step and after its last one.
"""

import logging
import os
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.checkpoint import Checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

LAYERS, EXPERTS = 4, 6


class Layer(nn.Module):
    """Two matrices whose sizes 4 does not divide, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 10)
        self.narrow = nn.Linear(10, 6)
        self.experts = nn.Linear(5, EXPERTS, bias=False)


class Stage(nn.Module):
    """Some of the layers, which keep the numbers that they have in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in numbers})


def fill(model: nn.Module, expert: int) -> None:
    """The same values on all ranks, by name, but other ones for each rank's own experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = zlib.crc32(name.encode()) + (expert if ".experts." in name else 0)
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def laid_out(layout: str) -> tuple[nn.Module, Any, int]:
    """The model of this rank, the mesh in which experts differ, and which of them are this rank's."""
    world = dist.get_world_size()
    stages = 2 if layout.startswith("pp_") else 1
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "inner"))
    each = LAYERS // stages
    model = Stage(range(mesh.get_local_rank("pp") * each, (mesh.get_local_rank("pp") + 1) * each))
    if layout in ("pp_fsdp", "fsdp"):
        fill(model, 0)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["inner"])
        return fully_shard(model, mesh=mesh["inner"]), None, 0
    if layout == "pp_tp":
        fill(model, 0)
        for layer in model.layers.values():
            parallelize_module(layer, mesh["inner"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return model, None, 0
    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("edp", "ep"))
    expert = both.get_local_rank("ep") if layout == "declared" else 0
    fill(model, expert)
    for layer in model.layers.values():
        if layout == "ep_fsdp":
            spread = distribute_tensor(layer.experts.weight.detach(), both["ep"], [Shard(0)], src_data_rank=None)
            layer.experts.weight = nn.Parameter(spread)
        fully_shard(layer.experts, mesh=both["edp"])
    fully_shard(model, mesh=mesh["inner"], ignored_params={layer.experts.weight for layer in model.layers.values()})
    return model, both["ep"] if layout == "declared" else None, expert


def whole_states(model: nn.Module, optimizer: Any, expert: int) -> dict[str, Any]:
    """All tensors of this rank by name, whole. A collective call."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        label = f"{name} {expert}" if ".experts." in name else name
        for key, value in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{label} {key}"] = whole.clone()
    return found


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def made() -> tuple[nn.Module, Any, int, Checkpoint]:
        model, experts, expert = laid_out(job["layout"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        differs_in = {"model.layers.*.experts": experts} if experts is not None else None
        return model, optimizer, expert, Checkpoint(model=model, optimizer=optimizer, differs_in=differs_in)

    model, optimizer, expert, checkpoint = made()
    done = checkpoint.restore(durable=job.get("durable") or None)
    before, again = whole_states(model, optimizer, expert), None
    if job.get("again"):
        del os.environ["MUSTER_AGENT_FD"]
        other, its_optimizer, _, from_folder = made()
        assert from_folder.restore(durable=job["again"]) == done
        again = whole_states(other, its_optimizer, expert)
    while done < job["steps"]:
        done += 1
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * done + 0.5
        optimizer.step()
        dist.barrier()
        checkpoint.step(done, final=done == job["steps"])
    after = whole_states(model, optimizer, expert)
    torch.save({"before": before, "again": again, "after": after}, Path(job["out"], f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    run_ranks(train)
