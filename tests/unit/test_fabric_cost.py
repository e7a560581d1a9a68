"""The cost model's laws: what holds for every size, group and accelerator."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.cost import accelerators, bisection, collectives, pipeline, reliability, roofline
from muster.fabric.cost.accelerators import AcceleratorError
from muster.fabric.cost.choice import Algorithm, Collective, cheapest
from muster.fabric.cost.hierarchy import Tier, ranks_of
from muster.fabric.model.link import Link

LINKS = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
TIERS = st.lists(st.builds(Tier, st.integers(1, 64), LINKS, st.floats(0.1, 16)), max_size=4).map(tuple)
SIZES = st.floats(0, 1e12)
KINDS = st.sampled_from(Collective)
SHIPPED = tomllib.loads(Path(accelerators.__file__).with_suffix(".toml").read_text())


@given(KINDS, TIERS, SIZES, SIZES)
def test_more_bytes_never_take_less_time(kind: Collective, tiers: tuple[Tier, ...], one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert cheapest(kind, tiers, less).seconds <= cheapest(kind, tiers, more).seconds * (1 + 1e-9)


@given(KINDS, TIERS, SIZES)
def test_a_choice_more_never_costs_more(kind: Collective, tiers: tuple[Tier, ...], size: float) -> None:
    assert cheapest(kind, tiers, size, in_network=True).seconds <= cheapest(kind, tiers, size).seconds


@given(KINDS, TIERS, SIZES)
def test_a_tier_that_joins_nothing_costs_nothing(kind: Collective, tiers: tuple[Tier, ...], size: float) -> None:
    alone = Tier(1, Link(1.0, 1.0))
    assert cheapest(kind, (alone, *tiers, alone), size) == cheapest(kind, tiers, size)
    assert cheapest(kind, (alone,), size).algorithm is Algorithm.NOTHING


@given(st.sampled_from([kind for kind in Collective if kind is not Collective.SEND]), LINKS, SIZES, st.integers(2, 512))
def test_one_tier_is_the_formula_of_its_link(kind: Collective, link: Link, size: float, ranks: int) -> None:
    ring = collectives.ring_pass(ranks, size, link)
    found = cheapest(kind, (Tier(ranks, link),), size).seconds
    if kind is Collective.ALL_REDUCE:
        assert found <= 2 * ring * (1 + 1e-9)
    else:
        assert found == pytest.approx(ring)


def test_the_tree_beats_the_ring_where_latency_decides_only() -> None:
    link = Link(5e-6, 25e9)
    assert collectives.tree_all_reduce(512, 1e3, link) < collectives.ring_all_reduce(512, 1e3, link) / 10
    assert collectives.ring_all_reduce(8, 1e9, link) < collectives.tree_all_reduce(8, 1e9, link)
    assert [collectives.depth(ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_an_all_to_all_waits_for_the_tier_that_carries_most() -> None:
    """4 nodes of 8: of each rank's 31 parts, 7 stay in the node and 24 leave on its own NIC."""
    tiers = (Tier(8, Link(0, 300e9)), Tier(4, Link(0, 12.5e9), rails=8))
    assert ranks_of(tiers) == 32
    found = cheapest(Collective.ALL_TO_ALL, tiers, 32e9).seconds
    assert found == pytest.approx(24e9 / 12.5e9)
    one_nic = (tiers[0], Tier(4, Link(0, 12.5e9)))
    assert cheapest(Collective.ALL_TO_ALL, one_nic, 32e9).seconds == pytest.approx(8 * found)


@pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
def test_a_message_has_a_size(size: float) -> None:
    with pytest.raises(ValueError, match="0 or more bytes"):
        cheapest(Collective.ALL_REDUCE, (Tier(2, Link(0, 1e9)),), size)


@pytest.mark.parametrize(("size", "rails"), [(0, 1.0), (2, 0.0), (2, math.nan), (-3, 1.0)])
def test_a_tier_joins_something(size: int, rails: float) -> None:
    with pytest.raises(ValueError, match="a size of 1 or more and rails above 0"):
        Tier(size, Link(0, 1e9), rails)


def test_what_crosses_the_bisection() -> None:
    """An all-to-all of 64 ranks with 1 GB each sends half of one half's 32 GB across; a ring sends its buffer twice."""
    crossing = bisection.all_to_all_crossing(64, 1e9)
    assert crossing == 16e9
    assert crossing / bisection.bisection_bandwidth(64, 6.25e9) == pytest.approx(0.08)
    assert bisection.ring_crossing(64, 1e9) == pytest.approx(1.96875e9)


def test_shipped_accelerators_agree_with_what_is_known_of_them() -> None:
    table = accelerators.read(SHIPPED, "accelerators.toml")
    _, h100 = accelerators.look_up("h100-sxm", table)
    assert round(roofline.ridge(h100.peak("bf16"), h100.memory_bandwidth), 1) == 295.3
    assert {"H200-SXM", "B200", "GB200-NVL72", "A100-SXM-80GB", "MI300X"} <= table.keys()
    for name, entry in table.items():
        assert entry.source, name
        assert entry.memory >= 30e9, name
        assert 10 < roofline.ridge(entry.peak("fp16"), entry.memory_bandwidth) < 500, name
        assert entry.link < entry.memory_bandwidth, name
        assert list(entry.flops.values()) == sorted(entry.flops.values()), name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H100", "fits H100-SXM, H100-PCIE: name one of them"),
        ("MI30O", "known are MI300X"),
        ("", "is not known; known are V100"),
    ],
)
def test_a_wrong_name_gets_the_names_that_are_near(name: str, words: str) -> None:
    with pytest.raises(AcceleratorError, match=words):
        accelerators.look_up(name, accelerators.read(SHIPPED, "accelerators.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[X]\nflops = { bf16 = 0 }", "X.flops.bf16: Input should be greater than 0"),
        ("[X]\nlinc = 3", "site.toml: X"),
        ("X = 3", "site.toml: X"),
    ],
)
def test_a_wrong_entry_is_named(text: str, words: str) -> None:
    with pytest.raises(AcceleratorError, match=words):
        accelerators.read(tomllib.loads(text), "site.toml")


def test_an_accelerator_says_which_precisions_it_has() -> None:
    _, a100 = accelerators.look_up("A100-SXM-80", accelerators.read(SHIPPED, "accelerators.toml"))
    with pytest.raises(
        AcceleratorError, match="no peak for precision 'fp8' is known; known are fp32, tf32, bf16, fp16"
    ):
        a100.peak("fp8")


@given(st.integers(1, 256), st.integers(1, 1024), st.integers(1, 16))
def test_interleaving_shrinks_the_bubble(stages: int, micro_batches: int, virtual: int) -> None:
    plain, interleaved = (pipeline.bubble_share(stages, micro_batches, v) for v in (1, virtual))
    assert 0 <= interleaved <= plain < 1
    stretch = pipeline.stretch(stages, micro_batches, virtual)
    assert 1 - 1 / stretch == pytest.approx(interleaved)


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "expected"),
    [(96, 8, 1, 1.0), (96, 8, 3, 1.0), (80, 16, 1, 1.0), (61, 16, 1, 64 / 61), (80, 8, 4, 96 / 80)],
)
def test_stages_that_do_not_balance_stretch_a_step(layers: int, stages: int, virtual: int, expected: float) -> None:
    assert pipeline.imbalance(layers, stages, virtual) == pytest.approx(expected)


def test_checkpoint_intervals() -> None:
    """M = 24 h, δ = 5 min. Young: √(2 · 300 · 86,400) = 7,200 s. Daly: 7,200 (1 + 0.01389 + 0.00019) − 300 s."""
    day, five = 24 * 3600.0, 300.0
    assert reliability.young_interval(day, five) == pytest.approx(7200)
    assert reliability.daly_interval(day, five) == pytest.approx(7001, abs=1)
    assert reliability.daly_interval(100, 300) == 100


@given(st.floats(3600, 1e7), st.floats(0.1, 600), st.floats(0.1, 600))
def test_dalys_interval_is_the_best_one(mtbf: float, checkpoint: float, recovery: float) -> None:
    best = reliability.daly_interval(mtbf, checkpoint)
    reached = reliability.goodput(mtbf, best, checkpoint, recovery)
    assert 0 < reached < 1
    for other in (best / 3, best * 3):
        assert reliability.goodput(mtbf, other, checkpoint, recovery) < reached


def test_goodput_of_a_job_that_never_gets_far_is_nothing() -> None:
    assert reliability.goodput(1.0, 3600, 60, 60) == 0.0


def test_spares() -> None:
    """1,000 nodes of 1,000 h and a day of repair: 24 nodes are away on average."""
    chance = [reliability.spares_suffice(1000, 1000.0, 24.0, spares) for spares in (0, 1, 24, 40)]
    assert chance[0] == 0
    assert chance[1] == pytest.approx(math.exp(-24))
    assert 0.4 < chance[2] < 0.5
    assert chance[3] > 0.998
    assert reliability.expected_recovery(4.0, 3600.0, 0.75) == 903.0
    assert reliability.spares_suffice(100_000, 1.0, 24.0, 10) == 0.0
