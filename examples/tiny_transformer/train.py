"""Trains a small transformer on keepers_log.txt with data parallelism: replicas, or with --fsdp sharded parameters.

The lines with `checkpoint` are all that Muster needs. Without Muster they do nothing, and the script runs under
torchrun:

    torchrun --nproc-per-node 2 train.py --steps 50
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from model import Transformer
from text import Windows
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from muster.checkpoint import Checkpoint, ShardedSampler

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    """The command line; the defaults give 3.2 million parameters."""
    parser = argparse.ArgumentParser(description="Trains a small transformer on a lighthouse keeper's log.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--until", type=Path, help="train until this file exists, however many steps that takes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=32, help="bytes that the model sees at once")
    parser.add_argument("--batch", type=int, default=2, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", help="of the process group; default: nccl on GPUs, else gloo")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="size of DDP's gradient buckets")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the parameters over the ranks (FSDP2), without replicas"
    )
    parser.add_argument("--text", type=Path, default=HERE / "keepers_log.txt")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to rest after each step")
    parser.add_argument("--digest", type=Path, help="write the final weights' SHA-256 to DIGEST.RANK")
    parser.add_argument("--sample", type=int, default=0, help="characters to write with the trained model")
    return parser.parse_args()


def main() -> None:
    """Join the process group, train, and print the result."""
    args = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.set_num_threads(args.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it if algorithms are deterministic
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    dist.init_process_group(args.backend or ("nccl" if cuda else "gloo"))
    try:
        model = train(args, device)
        if model is not None:
            finish(args, model, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> Transformer | None:
    """Train up to `args.steps` finished steps, from the last step that was kept.

    Returns:
        The trained model; None after a planned stop, because the job will be started again.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Transformer(
        width=args.width, layers=args.layers, heads=args.heads, context=args.context, dropout=args.dropout
    ).to(device)
    parallel = fully_sharded(model) if args.fsdp else DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=args.lr, fused=True)
    windows = Windows(args.text, context=args.context)
    sampler = ShardedSampler(windows, batch_size=args.batch, seed=args.seed)
    # With a generator of its own, the loader draws nothing from the one that dropout uses.
    loader = DataLoader(windows, batch_sampler=sampler, generator=torch.Generator())
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # one epoch after the other

    def backward(batch: list[torch.Tensor]) -> float:
        text, target = (part.to(device) for part in batch)
        loss = functional.cross_entropy(parallel(text).flatten(0, 1), target.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return float(loss.detach())

    total_steps = 0 if args.until else args.steps
    checkpoint = Checkpoint(model=parallel, optimizer=optimizer, sampler=sampler, total_steps=total_steps)
    start = checkpoint.restore(warmup=lambda: backward(next(iter(loader))))
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count} parameters, {world} ranks, starting after step {start}", flush=True)
    for step in itertools.count(start + 1) if args.until else range(start + 1, args.steps + 1):
        started = time.monotonic()
        loss = backward(next(batches))
        optimizer.step()
        last = is_last(args, step, device)
        go_on = checkpoint.step(step, final=last, loss=loss, tokens=args.batch * args.context, lr=args.lr)
        if rank == 0:
            print(f"step {step} loss {loss:.4f} {time.monotonic() - started:.3f} s", flush=True)
        if not go_on:
            return None
        if last:
            break
        time.sleep(args.pause)
    return model


def fully_sharded(model: Transformer) -> Transformer:
    """The model with a part of each parameter on each rank: block by block, then the rest."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def is_last(args: argparse.Namespace, step: int, device: torch.device) -> bool:
    """Whether training ends with `step`. All ranks get the same answer, though they look for the file at different
    times."""
    if args.until is None:
        return step >= int(args.steps)
    found = torch.tensor(float(args.until.exists()), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def finish(args: argparse.Namespace, model: Transformer, device: torch.device) -> None:
    """Write the digest and a sample, if the options ask for them."""
    rank = dist.get_rank()
    if args.digest:
        Path(f"{args.digest}.{rank}").write_text(digest(model) + "\n")
    if args.sample and rank == 0:
        print(sample(model, args.sample, args.context, device), flush=True)


def digest(model: Transformer) -> str:
    """SHA-256 over the name and bytes of every parameter: equal weights give equal digests."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        total.update(name.encode())
        total.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


@torch.no_grad()
def sample(model: Transformer, length: int, context: int, device: torch.device) -> str:
    """The model's continuation of "Monday, ", always with the most likely byte."""
    model.eval()
    text = list(b"Monday, ")
    for _ in range(length):
        seen = torch.tensor([text[-context:]], device=device)
        text.append(int(model(seen)[0, -1].argmax()))
    return bytes(text).decode(errors="replace")


if __name__ == "__main__":
    main()
