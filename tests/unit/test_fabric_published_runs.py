"""The estimate against published runs with sharded parameters (FSDP), to which nothing was fitted."""

from __future__ import annotations

import math
from statistics import median

import pytest

from muster.fabric.cost.model import Checkpointing, Model, Sharding
from muster.fabric.estimate.chip import Chip
from muster.fabric.estimate.estimate import Estimate, Plan, estimate
from muster.fabric.estimate.failures import Failures
from muster.fabric.estimate.schedule import Schedule
from muster.fabric.estimate.spread import Seats
from muster.fabric.groups.axes import Axes
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import Node
from muster.fabric.sources.tiers import Tiers
from muster.fabric.testing.generators import fat_tree

CHIPS = {
    "H100": (Chip(989.4e12, 85.0e9, 3.35e12, efficiency=0.55), Link(1e-6, 450e9), Link(5e-6, 50e9)),
    "A100": (Chip(312e12, 85.0e9, 2.039e12, efficiency=0.63), Link(1e-6, 300e9), Link(5e-6, 25e9)),
    "A100-40": (Chip(312e12, 42.5e9, 1.555e12, efficiency=0.63), Link(1e-6, 300e9), Link(5e-6, 25e9)),
}
"""Accelerator, NVLink, and adapter of each GPU."""
MODELS = {
    "70b": (64_862_437_376, 80, 8192, 64), "30b": (29_975_214_080, 48, 7168, 56), "13b": (12_853_954_560, 40, 5120, 40),
    "7b": (6_658_859_008, 32, 4096, 32), "3b": (2_651_837_440, 32, 2560, 20), "1b": (1_315_950_592, 24, 2048, 16),
    "760m": (760_470_528, 24, 1536, 12),
}  # fmt: skip
"""Parameters, layers, hidden size, heads of MPT's models."""
RUNS = (
    ("H100", "70b", 64, 8, 4, True, 66_523), ("H100", "70b", 32, 2, 16, True, 28_242),
    ("H100", "30b", 32, 14, 3, True, 73_860), ("H100", "30b", 16, 10, 3, True, 36_209),
    ("H100", "30b", 8, 3, 21, True, 16_022), ("H100", "13b", 64, 2, 1, False, 307_209),
    ("H100", "13b", 32, 2, 1, False, 153_960), ("H100", "13b", 16, 2, 1, False, 76_280),
    ("H100", "13b", 8, 2, 1, False, 38_336), ("H100", "7b", 8, 6, 1, False, 85_144),
    ("H100", "3b", 64, 6, 3, False, 1_441_663), ("H100", "3b", 32, 6, 3, False, 736_701),
    ("H100", "3b", 16, 10, 3, False, 386_285), ("H100", "1b", 64, 20, 1, False, 2_841_754),
    ("H100", "1b", 32, 20, 1, False, 1_444_183), ("H100", "1b", 8, 14, 1, False, 363_645),
    ("H100", "760m", 32, 24, 1, False, 2_175_091),
    ("A100", "70b", 64, 8, 4, True, 26_274), ("A100", "70b", 32, 2, 16, True, 11_962),
    ("A100", "30b", 8, 3, 21, True, 7330), ("A100", "13b", 8, 2, 3, False, 18_097),
    ("A100", "7b", 8, 6, 2, False, 37_130), ("A100", "3b", 8, 10, 2, False, 86_491),
    ("A100", "1b", 8, 14, 4, False, 164_109),
    ("A100-40", "70b", 128, 4, 1, True, 48_194), ("A100-40", "70b", 64, 2, 1, True, 17_672),
    ("A100-40", "30b", 128, 6, 1, True, 110_803), ("A100-40", "30b", 32, 4, 1, True, 27_431),
    ("A100-40", "13b", 128, 16, 1, True, 252_444), ("A100-40", "13b", 64, 16, 1, True, 126_479),
    ("A100-40", "13b", 32, 14, 1, True, 63_946), ("A100-40", "13b", 16, 10, 1, True, 31_900),
    ("A100-40", "13b", 8, 4, 16, True, 13_347), ("A100-40", "7b", 128, 18, 1, True, 463_749),
    ("A100-40", "7b", 64, 18, 1, True, 234_614), ("A100-40", "7b", 32, 18, 1, True, 119_202),
    ("A100-40", "7b", 16, 16, 1, True, 58_322), ("A100-40", "7b", 8, 12, 4, True, 29_436),
    ("A100-40", "3b", 128, 6, 1, False, 1_220_885),
)  # fmt: skip
"""Published: LLM Foundry, scripts/train/benchmarking/README.md (2023): sequences of 2,048 tokens, FSDP with FULL_SHARD.

Accelerator, model, GPUs, micro-batch, micro-batches, whether activations are computed again, tokens a second.
"""


def _estimated(run: tuple[str, str, int, int, int, bool, int]) -> tuple[Estimate, float]:
    """The estimate of a run, and its step over the published one."""
    name, size, gpus, micro_batch, micro_batches, again, tokens = run
    parameters, layers, hidden, heads = MODELS[size]
    model = Model(
        parameters, layers, hidden, 2048, gpus * micro_batch * micro_batches, heads=heads, vocabulary=50_368,
        activation_checkpointing=Checkpointing.FULL if again else Checkpointing.NONE, sharding=Sharding.PARAMETERS,
    )  # fmt: skip
    chip, link, nic = CHIPS[name]
    nodes = gpus // 8
    tiers = Tiers({Level.NODE: link, Level.LEAF: nic, Level.POD: nic, Level.ANY: nic}, {})
    fabric = fat_tree(16, max(2, math.ceil(nodes / 16)), tiers=tiers)
    described = tuple(Node(node, 8, gpu_link=link) for node in fabric.nodes)
    seats = Seats(Fabric(fabric.root, described), tuple(f"n{at}" for at in range(nodes)), local_ranks=8, nics=8)
    plan = Plan(model, Axes(data=gpus), Schedule(micro_batch, micro_batches), chip, seats, Failures(nodes))
    found = estimate(plan)
    return found, found.step.total * tokens / model.tokens


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[1]} on {run[2]}")
def test_a_published_run_with_fsdp_fits_and_takes_about_as_long(
    run: tuple[str, str, int, int, int, bool, int],
) -> None:
    found, ratio = _estimated(run)
    assert found.fits
    assert ratio == pytest.approx(1, abs=0.22)


@pytest.mark.parametrize(
    ("name", "usual", "half"), [("H100", 0.90, 0.09), ("A100", 1.10, 0.11), ("A100-40", 1.15, 0.03)]
)
def test_the_estimate_is_off_by_about_the_same_for_all_runs_of_an_accelerator(
    name: str, usual: float, half: float
) -> None:
    """The reason to calibrate with a measured step. `half`: how near to `usual` half of the runs are."""
    ratios = [_estimated(run)[1] for run in RUNS if run[0] == name]
    assert median(ratios) == pytest.approx(usual, abs=0.02)
    assert median(abs(ratio - median(ratios)) for ratio in ratios) < half
