"""What vendors publish for known GPUs, and how much of it a healthy one reaches.

A GPU that is not in the table is judged by no absolute number: the coordinator compares the nodes of a gang.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path(__file__).with_name("published_rates.toml")
LOWEST_SHARE = 0.5
"""The share of a published rate below which a GPU is slow. It is chosen, not measured: no program reaches the whole
rate, and a GPU whose clocks are held down for heat or power loses more than half of it."""


@dataclass(frozen=True, slots=True)
class PublishedRates:
    """Rates of one model. `tf32_gflops`: matrix units, dense."""

    tf32_gflops: float
    memory_gb_s: float


def rates_of(model: str) -> PublishedRates | None:
    """The rates of a GPU by the name that its driver gives; None if they are not known."""
    row = tomllib.loads(_TABLE.read_text()).get(model)
    return PublishedRates(row["tf32_gflops"], row["memory_gb_s"]) if row else None


def why_slow(model: str, gflops: float, memory_gb_s: float) -> str:
    """Which rate is too low for the model, in words; empty if none is, or if the model is not known."""
    published = rates_of(model)
    if published is None:
        return ""
    for measured, expected, what in (
        (gflops, published.tf32_gflops, "GFLOP/s"),
        (memory_gb_s, published.memory_gb_s, "GB/s of its memory"),
    ):
        if measured < LOWEST_SHARE * expected:
            return f"{model} reaches {measured:.0f} {what}, {measured / expected:.0%} of the published {expected:.0f}"
    return ""
