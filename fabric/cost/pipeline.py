"""What a pipeline loses: its bubble, and stages of different size. Pure.

Source: Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(2021), 2.2.
"""

from __future__ import annotations

import math


def bubble_share(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """The share of a step in which a stage waits: (s−1)/(vm + s−1); v is 1 without interleaving."""
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def stretch(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """How many times longer a step takes than without the bubble: 1 + (s−1)/(vm)."""
    return 1 + (stages - 1) / (virtual_stages * micro_batches)


def imbalance(layers: int, stages: int, virtual_stages: int = 1) -> float:
    """The layers of the largest stage over the mean: 1 if all stages have the same number. All others wait for it."""
    chunks = stages * virtual_stages
    return math.ceil(layers / chunks) * chunks / layers
