"""Tokens a day, days and money. Pure.

Sources: Kaplan and others (2020, arXiv 2001.08361): C = 6ND; Chowdhery and others, "PaLM"
(2022), appendix B: the attention's 12·L·h·s for each token, and the model FLOPs utilization (MFU).
"""

from __future__ import annotations

from muster.fabric.cost.model import Checkpointing, Model

DAY = 86_400.0
"""Seconds."""


def training_flop(parameters: float, tokens: float) -> float:
    """FLOP of a training run: C = 6ND."""
    return 6 * parameters * tokens


def tokens_a_day(parameters: float, peak: float, utilization: float) -> float:
    """Tokens of a day: utilization · peak FLOP/s of all GPUs · 86,400 s / 6N."""
    return utilization * peak * DAY / training_flop(parameters, 1)


def days(tokens: float, a_day: float) -> float:
    """Days for so many tokens."""
    return tokens / a_day


def cost(gpus: int, days_needed: float, price: float) -> float:
    """Price of a run: GPUs · 24 h · days · price of a GPU for an hour, in the price's currency."""
    return gpus * 24 * days_needed * price


def attention_flop(model: Model) -> float:
    """FLOP of the scores and their sums for one token, forward and backward: 12·L·h·s. The weights are not in it."""
    return 12.0 * model.layers * model.hidden_size * model.sequence_length


def token_flop(model: Model) -> float:
    """FLOP that the model itself needs for one token, forward and backward: 6N + 12·L·h·s."""
    return training_flop(model.active_parameters, 1) + attention_flop(model)


def computed_flop(model: Model) -> float:
    """FLOP that the GPUs compute for one token: what is thrown away is computed again.

    Full checkpointing repeats the forward pass, a third of forward and backward. Selective checkpointing and fused
    attention repeat the attention's own products: a third of 12·L·h·s.
    """
    if model.activation_checkpointing is Checkpointing.FULL:
        return token_flop(model) * 4 / 3
    return token_flop(model) + (0.0 if model.keeps_scores else attention_flop(model) / 3)
