"""Trains with DeepSpeed's engine, as a user writes it. test_deepspeed.py runs it.

The job: {"out", "steps", "seed", "stage", "bits"}. Each rank writes the digest of all that it trains with to out/RANK.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from muster.checkpoint.adapters.deepspeed import engine_checkpoint
from muster.checkpoint.testing.rank_processes import run_ranks

ACCUMULATION = 2
# DeepSpeed would compile its own collectives for CPUs, for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def digest(engine: Any) -> str:
    """Of weights, of this rank's part of the optimizer, and of the counters."""
    found = hashlib.sha256()
    zero = hasattr(engine.optimizer, "single_partition_of_fp32_groups")
    inner = engine.optimizer.optimizer if zero else engine.optimizer
    tensors = [*engine.module.state_dict().values()]
    tensors += engine.optimizer.single_partition_of_fp32_groups if zero else []
    tensors += [value for state in inner.state.values() for _, value in sorted(state.items())]
    for tensor in tensors:
        found.update(torch.as_tensor(tensor).detach().double().numpy().tobytes())
    found.update(repr((engine.global_steps, engine.micro_steps, engine.get_lr())).encode())
    return found.hexdigest()


def train(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # as Muster sets it
    dist.init_process_group("gloo")
    torch.manual_seed(job["seed"])
    model = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.2), nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": job["stage"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job["bits"] == 16},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    torch.manual_seed(job["seed"] + rank)
    checkpoint = engine_checkpoint(engine)
    done = checkpoint.restore()
    dtype = torch.bfloat16 if job["bits"] == 16 else torch.float32
    while done < job["steps"]:
        for part in range(ACCUMULATION):
            data = torch.full((4, 16), 0.1 * done + part + rank, dtype=dtype)
            engine.backward(engine(data).square().mean())
            engine.step()
        done += 1
        checkpoint.step(done, final=done == job["steps"])
    Path(job["out"], str(rank)).write_text(digest(engine))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(train)
