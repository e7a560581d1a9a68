"""The example's training with plain PyTorch: DDP, and a checkpoint file on shared storage.

Model, data, optimizer and loop are those of examples/tiny_transformer, whose model.py and text.py are copied into the
job's folder. Every `--every` steps, rank 0 writes model, optimizer, sampler and step to a new file and then renames it.
At the start, every rank reads the newest checkpoint. The script runs under srun and under torchrun.

Each start and each finished step is a line of `--log` with the wall-clock time. Each rank writes its host and process:

    rank 3 on n4 in process 4711
    start after step 40 of 8 ranks at 1700000000.123456
    step 41 loss 2.9321 0.104 s at 1700000000.345678
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import no_libuv  # noqa: F401  (nothing but the name is needed)
import torch
import torch.distributed as dist
from model import Transformer
from text import Windows
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, default_collate

HERE = Path(__file__).resolve().parent
BATCH = 2
"""Windows of a rank and step, as in the example."""


class Batches:
    """This rank's batches, one epoch after the other, and how many of them were read."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.sampler = DistributedSampler(windows, seed=1, drop_last=True)
        self.read = 0

    def next(self) -> list[torch.Tensor]:
        """Inputs and targets."""
        epoch, number = divmod(self.read, len(self.sampler) // BATCH)
        self.sampler.set_epoch(epoch)
        self.read += 1
        return default_collate([self.windows[i] for i in list(self.sampler)[number * BATCH : (number + 1) * BATCH]])

    def state_dict(self) -> dict[str, int]:
        """The present position."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position in `state`."""
        self.read = state["read"]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The tiny transformer with a checkpoint on shared disk.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--timeout", type=float, help="seconds until a collective fails (default: torch's, 30 min)")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint.pt")
    parser.add_argument("--log", type=Path, default=HERE / "steps.log")
    return parser.parse_args()


def join(timeout: float | None) -> None:
    """Joins the process group, with the rank numbers of torchrun or, without torchrun, of srun."""
    for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(name, os.environ.get(slurm, ""))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout) if timeout else None)


def main() -> None:
    """Trains up to `--steps` finished steps, from the newest checkpoint."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    join(args.timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Transformer(width=256, layers=4, heads=4, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(Windows(HERE / "keepers_log.txt", context=32))
    training = {"model": model.module, "optimizer": optimizer, "sampler": batches}
    start = load(args.checkpoint, training)
    with args.log.open("a") as log:
        write_line(log, f"rank {rank} on {os.uname().nodename} in process {os.getpid()}")
        if rank == 0:
            write_line(log, f"start after step {start} of {world} ranks at {time.time():.6f}")
        for step in range(start + 1, args.steps + 1):
            began = time.monotonic()
            text, target = batches.next()
            loss = functional.cross_entropy(model(text).flatten(0, 1), target.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if rank == 0:
                took = time.monotonic() - began
                write_line(log, f"step {step} loss {loss.item():.4f} {took:.3f} s at {time.time():.6f}")
                if step % args.every == 0:
                    save(args.checkpoint, training, step)
    dist.destroy_process_group()


def write_line(log: TextIO, line: str) -> None:
    """Writes one line and flushes."""
    print(line, file=log, flush=True)


def save(path: Path, training: dict[str, object], step: int) -> None:
    """Writes a checkpoint to a new file, then renames it: a reader always finds a complete checkpoint."""
    state = {name: part.state_dict() for name, part in training.items()}  # type: ignore[attr-defined]
    aside = path.with_suffix(".new")
    torch.save({**state, "step": step}, aside)
    aside.rename(path)


def load(path: Path, training: dict[str, object]) -> int:
    """Loads the newest checkpoint. Returns its step; 0 if there is none."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, part in training.items():
        part.load_state_dict(saved[name])  # type: ignore[attr-defined]
    return int(saved["step"])


if __name__ == "__main__":
    main()
