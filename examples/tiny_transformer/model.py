"""A small decoder-only transformer over bytes, with the output layer tied to the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each normalised first. Input and output: (batch, context, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.merge(seen.transpose(1, 2).reshape(batch, context, width)))
        mixed: Tensor = x + self.dropout(self.feed(self.norm_feed(x)))
        return mixed


class Transformer(nn.Module):
    """Predicts the next byte. Input: (batch, context) of byte values; output: (batch, context, 256) logits.

    The head is registered first and used last, and shares its weight with the embedding: so the example shows that
    nothing depends on the order in which parameters are registered.
    """

    def __init__(self, *, width: int, layers: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.position = nn.Embedding(context, width)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.apply(_initialise)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
