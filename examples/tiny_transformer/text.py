"""The text as tensors, and a sampler whose position can be kept.

The sampler's state is part of the training state: a resumed run continues at the position of the interrupted run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class Windows:
    """Batches of (input, target) windows. Each epoch has its own order, which is the same on every rank.

    Rank r of w takes windows r, r + w, ... of each global batch. Both tensors: (batch, context), int64.
    """

    def __init__(self, path: Path, *, context: int, batch: int, rank: int, world: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self.context, self.batch, self.rank, self.world, self.seed = context, batch, rank, world, seed
        self.count = (len(self.text) - 1) // context
        if self.count < batch * world:
            raise ValueError(f"{path} holds {self.count} windows, fewer than one batch of {batch} x {world}")
        self.epoch = 0
        self.cursor = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's share of the next global batch."""
        if self.cursor + self.batch * self.world > self.count:
            self.epoch, self.cursor = self.epoch + 1, 0
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        mine = order[self.cursor + self.rank : self.cursor + self.batch * self.world : self.world]
        self.cursor += self.batch * self.world
        at = mine[:, None] * self.context + torch.arange(self.context)
        return self.text[at], self.text[at + 1]

    def state_dict(self) -> dict[str, int]:
        """The present position."""
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position in `state`."""
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
