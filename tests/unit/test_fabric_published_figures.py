"""The cost model reproduces published figures. Each row has its formula, its inputs, its unit and its status.

Status: `published` stands in the literature as it is here; `derived` follows from published inputs with the formula
named; `exercise` is worked out from the same formula for other inputs; `corrected` is published with other inputs
than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from muster.fabric.cost import (
    bisection,
    collectives,
    hierarchy,
    pipeline,
    reliability,
    roofline,
    state_bytes,
    throughput,
)
from muster.fabric.cost.choice import Algorithm, Collective, cheapest
from muster.fabric.cost.hierarchy import Tier
from muster.fabric.cost.model import Model
from muster.fabric.model.link import Link

GIB = 2.0**30
NVLINK = Link(1e-6, 300e9)
NETWORK = Link(5e-6, 12.5e9)
IN_NODE = Link(0.0, 450e9 / 8)
ACROSS = Link(0.0, 50e9 / 8)
MS, S, HOUR, PERCENT = 1e3, 1.0, 1 / 3600, 100.0
TRILLION = Model(parameters=1e12, layers=128, hidden_size=25_600, sequence_length=2048, global_batch=3072)


@dataclass(frozen=True)
class Figure:
    """`value()` times `scale` is `expected` `unit`, to the digits that are printed."""

    name: str
    formula: str
    inputs: str
    value: Callable[[], float]
    expected: str
    unit: str
    status: str
    scale: float = 1.0


def _ring_in_node(size: float) -> float:
    return collectives.ring_all_reduce(8, size, NVLINK)


def _leaders(size: float) -> float:
    return hierarchy.leaders_all_reduce((Tier(8, NVLINK), Tier(4, NETWORK)), size)


def _flat(size: float) -> float:
    return collectives.ring_all_reduce(32, size, NETWORK)


def _flat_512(size: float = 14e9) -> float:
    return collectives.ring_all_reduce(512, size, ACROSS)


def _shards_512(size: float = 14e9) -> float:
    return hierarchy.sharded_all_reduce((Tier(8, IN_NODE), Tier(64, ACROSS, rails=8)), size)


def _rings_512(size: float = 14e9) -> float:
    in_node = collectives.ring_all_reduce(8, size, IN_NODE)
    return in_node + collectives.ring_all_reduce(64, size, ACROSS) + in_node


RING = "2(n−1)(α + B/(nβ))"
RING_INPUTS = "n = 8, B = 2³⁰; 300 GB/s, 1 µs; 12.5 GB/s, 5 µs"
LEADERS = "ring in 8 + ring of B over 4 leaders + broadcast α + B/β"
LEADERS_INPUTS = "32 ranks; 300 GB/s, 1 µs within 8; 12.5 GB/s, 5 µs across"
SHARDS = "reduce-scatter in 8, all-reduce of shards over 4, all-gather in 8"
VOLUME = "2(n−1)/n · B/β, α = 0"

FIGURES = (
    Figure("packed ring", RING, RING_INPUTS, lambda: _ring_in_node(GIB), "6.28", "ms", "published", MS),
    Figure("scattered ring", RING, RING_INPUTS, lambda: collectives.ring_all_reduce(8, GIB, NETWORK), "150.39", "ms",
           "published", MS),
    Figure("scattered over packed", RING, RING_INPUTS,
           lambda: collectives.ring_all_reduce(8, GIB, NETWORK) / _ring_in_node(GIB), "24.0", "×", "published"),
    Figure("flat ring of 32", RING, "n = 32, B = 2³⁰; 12.5 GB/s, 5 µs", lambda: _flat(GIB), "166.74", "ms", "published",
           MS),
    Figure("leaders of 4 × 8", LEADERS, LEADERS_INPUTS + "; B = 2³⁰", lambda: _leaders(GIB), "138.74", "ms",
           "published", MS),
    Figure("leaders: ring of leaders", RING, "n = 4, B = 2³⁰; 12.5 GB/s, 5 µs",
           lambda: collectives.ring_all_reduce(4, GIB, NETWORK), "128.88", "ms", "published", MS),
    Figure("leaders: broadcast", "α + B/β", "B = 2³⁰; 300 GB/s, 1 µs", lambda: collectives.broadcast(8, GIB, NVLINK),
           "3.58", "ms", "published", MS),
    Figure("flat over leaders, large", LEADERS, "2²⁸ parameters of 4 B", lambda: _flat(2**28 * 4) / _leaders(2**28 * 4),
           "1.20", "×", "published"),
    Figure("flat over leaders, small", LEADERS, "2¹⁶ parameters of 4 B", lambda: _flat(2**16 * 4) / _leaders(2**16 * 4),
           "4.45", "×", "published"),
    Figure("shards over 8 rails", SHARDS, LEADERS_INPUTS + "; 8 rails",
           lambda: hierarchy.sharded_all_reduce((Tier(8, NVLINK), Tier(4, NETWORK, rails=8)), GIB), "22.4", "ms",
           "derived", MS),
    Figure("shards over one NIC", SHARDS, LEADERS_INPUTS + "; one NIC for the node",
           lambda: hierarchy.sharded_all_reduce((Tier(8, NVLINK), Tier(4, NETWORK, rails=1)), GIB), "135", "ms",
           "derived", MS),
    Figure("14 GB in 8", VOLUME, "n = 8, 14e9 B, 450 Gb/s", lambda: collectives.ring_all_reduce(8, 14e9, IN_NODE),
           "435.6", "ms", "published", MS),
    Figure("14 GB in 64", VOLUME, "n = 64, 14e9 B, 50 Gb/s", lambda: collectives.ring_all_reduce(64, 14e9, ACROSS),
           "4410.0", "ms", "published", MS),
    Figure("64 over 8", VOLUME, "as above",
           lambda: collectives.ring_all_reduce(64, 14e9, ACROSS) / collectives.ring_all_reduce(8, 14e9, IN_NODE),
           "10.1", "×", "published"),
    Figure("14 GB flat in 512", VOLUME, "n = 512, 14e9 B, 50 Gb/s", _flat_512, "4471", "ms", "exercise", MS),
    Figure("14 GB, three rings of the full buffer", VOLUME, "8 at 450, 64 at 50, 8 at 450 Gb/s", _rings_512, "5281",
           "ms", "exercise", MS),
    Figure("14 GB in shards", SHARDS, "8 at 450 Gb/s, 64 at 50 Gb/s on 8 rails", _shards_512, "0.99", "s", "derived"),
    Figure("flat over shards", SHARDS, "as above", lambda: _flat_512() / _shards_512(), "4.5", "×", "derived"),
    Figure("bisection", "N/2 · b", "64 nodes, 50 Gb/s", lambda: bisection.bisection_bandwidth(64, 50e9), "1.60", "Tb/s",
           "published", 1e-12),
    Figure("bisection at 4:1", "N/2 · b / 4", "64 nodes, 50 Gb/s", lambda: bisection.bisection_bandwidth(64, 50e9, 4),
           "0.40", "Tb/s", "published", 1e-12),
    Figure("ridge of an A100", "peak / bandwidth", "312 TFLOP/s, 2.0 TB/s", lambda: roofline.ridge(312e12, 2.0e12),
           "156", "FLOP/B", "published"),
    Figure("product", "2n³ / 3en²", "n = 8,192, e = 2 B", lambda: roofline.product_intensity(8192, 8192, 8192, 2),
           "2731", "FLOP/B", "published"),
    Figure("product, share of the peak", "min(1, intensity / ridge)", "as above",
           lambda: roofline.attainable(8192 / 3, 312e12, 2.0e12) / 312e12, "100", "%", "published", PERCENT),
    Figure("matrix by vector", "2n² / e(n² + 2n)", "n = 8,192, e = 2 B",
           lambda: roofline.product_intensity(8192, 8192, 1, 2), "1.0", "FLOP/B", "published"),
    Figure("matrix by vector, share of the peak", "min(1, intensity / ridge)", "as above",
           lambda: roofline.attainable(roofline.product_intensity(8192, 8192, 1, 2), 312e12, 2.0e12) / 312e12, "0.6",
           "%", "published", PERCENT),
    Figure("ridge of an H100", "peak / bandwidth", "990 TFLOP/s, 3.35 TB/s", lambda: roofline.ridge(990e12, 3.35e12),
           "295.5", "FLOP/B", "exercise"),
    Figure("attainable at 220", "min(peak, intensity · bandwidth)", "990 TFLOP/s, 3.35 TB/s, 220 FLOP/B",
           lambda: roofline.attainable(220, 990e12, 3.35e12), "737", "TFLOP/s", "exercise", 1e-12),
    Figure("attainable at 2", "min(peak, intensity · bandwidth)", "990 TFLOP/s, 3.35 TB/s, 2 FLOP/B",
           lambda: roofline.attainable(2, 990e12, 3.35e12), "6.7", "TFLOP/s", "exercise", 1e-12),
    Figure("state of 1e12", "16 B a parameter", "1e12 parameters, AdamW, bf16",
           lambda: 1e12 * state_bytes.state_bytes(TRILLION).total, "16", "TB", "published", 1e-12),
    Figure("GPUs for 1e12", "16 B · N / memory, state alone", "1e12 parameters, 80 GB each",
           lambda: state_bytes.gpus_for_state(1e12, state_bytes.state_bytes(TRILLION).total, 80e9), "200", "GPUs",
           "published"),
    Figure("state of 175e9", "16 B a parameter", "175e9 parameters, AdamW, bf16",
           lambda: 175e9 * state_bytes.state_bytes(TRILLION).total, "2.8", "TB", "published", 1e-12),
    Figure("tokens a day", "C = 6ND", "N = 1e12, 40 % of 100 EFLOP/s",
           lambda: throughput.tokens_a_day(1e12, 100e18, 0.40), "576", "G tokens", "published", 1e-9),
    Figure("days", "D / tokens a day", "D = 15e12",
           lambda: throughput.days(15e12, throughput.tokens_a_day(1e12, 100e18, 0.40)), "26", "days", "published"),
    Figure("MTBF of 100,000 units", "MTBF / units", "50,000 h, 100,000 units",
           lambda: reliability.fleet_mtbf(50_000, 100_000), "0.5", "h", "published"),
    Figure("MTBF of 12,500 nodes", "MTBF / nodes", "50,000 h, 12,500 nodes",
           lambda: reliability.fleet_mtbf(50_000, 12_500), "4", "h", "corrected"),
    Figure("bubble", "(s−1)/(m+s−1)", "s = 16, m = 64", lambda: pipeline.bubble_share(16, 64), "19.0", "%",
           "formula published", PERCENT),
)  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_comes_out_as_it_is_printed(figure: Figure) -> None:
    digits = len(figure.expected.partition(".")[2])
    found = f"{figure.value() * figure.scale:.{digits}f}"
    assert found == figure.expected, f"{figure.formula}; {figure.inputs} [{figure.unit}, {figure.status}]"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_each_figure_says_where_it_comes_from(figure: Figure) -> None:
    assert all((figure.formula, figure.inputs, figure.unit))
    assert figure.status in ("published", "derived", "exercise", "corrected", "formula published")


def test_the_hierarchy_of_full_buffers_loses_and_that_of_shards_wins() -> None:
    assert _rings_512() > _flat_512() > _shards_512()
    assert cheapest(Collective.ALL_REDUCE, (Tier(8, IN_NODE), Tier(64, ACROSS, rails=8)), 14e9).seconds <= _shards_512()


def test_the_cheapest_algorithm_follows_the_size() -> None:
    tiers = (Tier(8, NVLINK), Tier(32, NETWORK, rails=8))
    assert cheapest(Collective.ALL_REDUCE, tiers, 4096).algorithm is Algorithm.TREE
    assert cheapest(Collective.ALL_REDUCE, tiers, 16 * GIB).algorithm is Algorithm.RING
    assert cheapest(Collective.ALL_REDUCE, tiers, 16 * GIB, in_network=True).algorithm is Algorithm.SWITCH
