"""The text as a data set of windows. The order in which training reads them is the sampler's business."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All (input, target) windows of a text, one after the other. Both tensors: (context), int64."""

    def __init__(self, path: Path, *, context: int) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """The window, and the same window one byte further on."""
        at = number * self.context
        return self.text[at : at + self.context], self.text[at + 1 : at + 1 + self.context]
