"""Data-parallel training as people write it for torchrun, without a line of Muster: a snapshot after each epoch.

`sbatch train.sbatch` runs it, and `muster submit train.sbatch` with a spare. After a failure it goes on from its own
newest snapshot. examples/tiny_transformer has the lines of Muster's library, which keep each step.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train for a number of epochs, those before the snapshot included."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    options = parser.parse_args()
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    model = DistributedDataParallel(torch.nn.Linear(20, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    first = load(options.snapshot, model, optimizer, device)
    inputs = torch.randn(2048, 20, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)  # each epoch has its own order, which is the same after a restart
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(options.snapshot, epoch + 1, model, optimizer)
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def load(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the snapshot, if there is one. Return the epoch to go on with."""
    if not path.exists():
        return 0
    found = torch.load(path, map_location=device)
    model.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["epochs"])


def save(path: Path, epochs: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Write the snapshot beside the old one first: a failure while it is written leaves the old one whole."""
    new = path.with_suffix(".new")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, new)
    new.replace(path)


if __name__ == "__main__":
    main()
