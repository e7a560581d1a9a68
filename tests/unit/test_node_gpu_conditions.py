"""What the readings of the GPUs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings, Link
from muster.daemon.node.sensors import gpu_conditions
from muster.daemon.node.sensors.gpu_conditions import GpuConditions
from muster.daemon.node.sensors.sensor import Observation
from muster.daemon.node.signal_windows import SignalRule, SignalWindows

HEALTHY = GpuReading(
    *(3, "0000:3b:00", "GPU-4a1c", "NVIDIA H100 80GB HBM3"),
    reasons=0,
    thermal_violation_ns=10**9,
    board_limit_ns=0,
    reliability_ns=0,
    power_brake_ns=0,
    temperature_c=91,
    margin_c=5,
    slowdown_margin_c=-2,
    power_mw=350_000,
    ecc_uncorrected=2,
    ecc_dram=1,
    ecc_sram=1,
    recovery_action=0,
    slowdown_c=90,
    remapped=(1, 0, 0, 0),
    retirement_pending=0,
    sram_over_threshold=False,
    mig=0,
    pcie=(5, 5, 16, 16),
    pcie_replays=12,
    links=((1, 3, 2, 1, 0),) * 18,
    fabric=(3, 0, "4a1c", 7, 0),
)


def _held(
    *gpus: GpuReading, conditions: GpuConditions | None = None, now: float = 0, count: int = 1
) -> dict[str, float]:
    """The conditions that hold, as "kind code"."""
    samples = (conditions or GpuConditions()).samples(GpuReadings(count, list(gpus)), now)
    return {f"{sample.kind} {sample.code}": sample.held for sample in samples if sample.held}


def test_a_healthy_gpu_has_samples_of_which_none_holds() -> None:
    conditions = GpuConditions()
    assert _held(HEALTHY, conditions=conditions) == {}
    samples = list(conditions.samples(GpuReadings(1, [HEALTHY]), 1.0))
    assert {sample.device for sample in samples} == {"0000:3b:00", ""}
    assert not any(sample.held for sample in samples)


@pytest.mark.parametrize(
    ("reasons", "held"),
    [
        (0x1, {}),  # idle
        (0x4, {}),  # the power cap
        (0x2 | 0x10 | 0x100, {}),  # what somebody has set
        (0x8, {"gpu-throttle 8": 1}),
        (0x20, {"gpu-throttle 32": 1}),
        (0x40, {"gpu-throttle 64": 1}),
        (0x80, {"gpu-throttle 128": 1}),
        (0x8 | 0x40, {"gpu-throttle 64": 1}),  # one cause is one signal
        (0x8 | 0x80 | 0x4, {"gpu-throttle 128": 1}),
        (0x40 | 0x80, {"gpu-throttle 64": 1, "gpu-throttle 128": 1}),
        (2**64 - 1, {"gpu-throttle 32": 1, "gpu-throttle 64": 1, "gpu-throttle 128": 1}),
    ],
)
def test_only_what_slows_a_gpu_down_by_itself_is_throttling(reasons: int, held: dict[str, float]) -> None:
    assert _held(replace(HEALTHY, reasons=reasons)) == held


def test_the_words_name_the_gpu_and_its_state() -> None:
    readings = GpuReadings(1, [replace(HEALTHY, reasons=0x40)])
    (sample,) = [each for each in GpuConditions().samples(readings, 7.0) if each.held]
    assert sample.text == "GPU 3 (NVIDIA H100 80GB HBM3, GPU-4a1c), 91 °C, 350 W: hardware thermal slowdown"
    assert sample.at == 7.0


@pytest.mark.parametrize(
    ("before_ns", "after_ns", "held"),
    [
        (0, 0, 0.0),
        (10**9, 10**9 + 250_000_000, 0.25),
        (10**9, 2 * 10**9, 1.0),
        (10**9, 10**9 + 1_200_000_000, 1.0),  # read a moment later than the time was taken
        (10**9, 10**9 - 1, None),  # back
        (2**64 - 5, 3, None),  # wrapped
        (0, 2 * 10**9, None),  # faster than time
        (0, 2**63, None),
    ],
)
@pytest.mark.parametrize(
    ("reading", "code"),
    [("thermal_violation_ns", 1), ("board_limit_ns", 3), ("reliability_ns", 5), ("power_brake_ns", 128)],
)
def test_a_counter_of_violations_gives_a_part_of_the_time(
    reading: str, code: int, before_ns: int, after_ns: int, held: float | None
) -> None:
    conditions = GpuConditions()
    _held(replace(HEALTHY, **{reading: before_ns}), conditions=conditions, now=100.0)
    samples = conditions.samples(GpuReadings(1, [replace(HEALTHY, **{reading: after_ns})]), 101.0)
    found = [each.held for each in samples if (each.kind, each.code) == (gpu_conditions.VIOLATION, code)]
    assert found == ([] if held is None else [held])


def test_memory_errors_count_when_they_are_new() -> None:
    conditions = GpuConditions()
    assert _held(HEALTHY, conditions=conditions, now=0) == {}  # from before the daemon's start
    assert _held(replace(HEALTHY, ecc_uncorrected=3), conditions=conditions, now=1) == {"gpu-memory 1": 1}
    assert _held(replace(HEALTHY, ecc_uncorrected=3), conditions=conditions, now=2) == {}
    assert _held(replace(HEALTHY, ecc_uncorrected=0), conditions=conditions, now=3) == {}  # a reset
    assert _held(replace(HEALTHY, ecc_uncorrected=2**63), conditions=conditions, now=4) == {}  # nonsense


def test_a_row_remap_is_pending_or_has_failed() -> None:
    assert _held(replace(HEALTHY, remapped=(0, 1, 1, 0))) == {"gpu-memory 2": 1}
    assert _held(replace(HEALTHY, remapped=(0, 1, 0, 1))) == {"gpu-memory 3": 1}


def test_what_can_not_be_read_gives_no_sample() -> None:
    conditions = GpuConditions()
    lost = GpuReading(3, "0000:3b:00", failed={"handle": 15})
    for now in (0.0, 1.0):
        samples = list(conditions.samples(GpuReadings(1, [lost]), now))
        assert {(each.kind, each.code): each.held for each in samples} == {
            ("nvml-error", 15): 1,
            **{("nvml-error", code): 0 for code in (8, 10, 14, 16, 999)},
            ("gpu-missing", 0): 0,
        }


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    conditions = GpuConditions()
    hot, lost = replace(HEALTHY, index=0, device="0000:1b:00", reasons=0x40), GpuReading(1, "", failed={"handle": 15})
    assert _held(lost, hot, conditions=conditions, count=2) == {"nvml-error 15": 1, "gpu-throttle 64": 1}


def test_a_gpu_that_was_there_is_missed() -> None:
    conditions = GpuConditions()
    assert _held(HEALTHY, conditions=conditions, count=8) == {}
    assert _held(HEALTHY, conditions=conditions, count=7) == {"gpu-missing 0": 1}
    assert _held(HEALTHY, conditions=conditions, count=8) == {}


def test_a_node_lacks_gpus_if_slurm_says_so() -> None:
    readings = GpuReadings(7, [HEALTHY])
    for in_gres, held in ((8, {"gpu-missing 1": 1.0}), (7, {}), (4, {}), (0, {}), (None, {})):
        samples = GpuConditions().samples(readings, 0.0, in_gres)
        assert {f"{each.kind} {each.code}": each.held for each in samples if each.held} == held
    split = GpuReadings(1, [replace(HEALTHY, mig=1)])
    assert not any(each.held for each in GpuConditions().samples(split, 0.0, in_gres=7))


@pytest.mark.parametrize("code", [10, 999])
def test_a_gpu_of_eight_that_answers_nothing_is_named_and_the_others_are_not(code: int) -> None:
    silent = GpuReading(0, "0000:1b:00", failed=dict.fromkeys(("reasons", "temperature_c", "power_mw", "links"), code))
    samples = [each for each in GpuConditions().samples(GpuReadings(8, [silent, HEALTHY]), 0.0) if each.held]
    assert [(each.kind, each.code, each.device) for each in samples] == [("nvml-error", code, "0000:1b:00")]


def test_one_reading_that_fails_is_no_sign_of_a_fault() -> None:
    assert _held(replace(HEALTHY, links=None, failed={"links": 999})) == {}
    assert _held(replace(HEALTHY, fabric=None, pcie=None, failed={"fabric": 10, "pcie": 3})) == {}


@pytest.mark.parametrize(
    ("margin_c", "slowdown_margin_c", "held"),
    [(-2, -2, False), (-3, -2, True), (0, 0, False), (40, -2, False), (None, -2, True), (-9, None, True)],
)
def test_a_gpu_is_too_hot_by_its_margin_or_by_its_temperature(
    margin_c: int | None, slowdown_margin_c: int | None, held: bool
) -> None:
    """It has 91 °C, and slows down at 90 °C if nothing better is known."""
    gpu = replace(HEALTHY, margin_c=margin_c, slowdown_margin_c=slowdown_margin_c)
    assert _held(gpu) == ({"gpu-temperature 1": 1} if held else {})


def test_memory_errors_are_told_by_kind() -> None:
    conditions = GpuConditions()
    assert _held(HEALTHY, conditions=conditions, now=0) == {}
    in_sram = replace(HEALTHY, ecc_uncorrected=3, ecc_sram=2)
    assert _held(in_sram, conditions=conditions, now=1) == {"gpu-memory 4": 1}
    in_dram = replace(in_sram, ecc_uncorrected=4, ecc_dram=2)
    assert _held(in_dram, conditions=conditions, now=2) == {"gpu-memory 5": 1}
    elsewhere = replace(in_dram, ecc_uncorrected=5)
    assert _held(elsewhere, conditions=conditions, now=3) == {"gpu-memory 1": 1}
    assert _held(replace(HEALTHY, ecc_dram=0, ecc_sram=0, ecc_uncorrected=0), conditions=conditions, now=4) == {}


def test_pages_and_sram_that_wait_for_a_repair() -> None:
    assert _held(replace(HEALTHY, retirement_pending=1)) == {"gpu-memory 6": 1}
    assert _held(replace(HEALTHY, sram_over_threshold=True)) == {"gpu-memory 7": 1}


@pytest.mark.parametrize(
    ("action", "held"), [(0, {}), (1, {"gpu-recovery 1": 1}), (7, {"gpu-recovery 7": 1}), (99, {})]
)
def test_the_driver_s_recovery_action_is_the_code(action: int, held: dict[str, float]) -> None:
    assert _held(replace(HEALTHY, recovery_action=action)) == held


def _signals(windows_of_boot: SignalWindows, seen: list[Observation], actions: Sequence[int]) -> list[str]:
    """What a node daemon reports of one GPU whose recovery action is each of these, second after second."""
    conditions = GpuConditions()
    for at, action in enumerate(actions):
        gpu = replace(HEALTHY, recovery_action=action)
        for sample in conditions.samples(GpuReadings(1, [gpu]), float(at), in_gres=1):
            windows_of_boot.report(sample)
    return [f"{one.kind} {one.code}" for one in seen]


def test_a_gpu_that_wants_a_reset_is_seen_at_the_start_and_not_after_its_repair() -> None:
    """Its Xid was in the log before the daemon started, and all its counters are 0."""
    rules = [SignalRule(**asdict(rule)) for rule in Policy.load().rules()]
    seen: list[Observation] = []
    windows = SignalWindows(seen.append)
    windows.use(rules)
    assert _signals(windows, seen, [1] * 12) == ["gpu-recovery 1"]
    assert _signals(windows, seen, [0] * 90) == ["gpu-recovery 1", "gpu-recovery-over 1"]
    after_boot: list[Observation] = []
    windows = SignalWindows(after_boot.append)
    windows.use(rules)
    assert _signals(windows, after_boot, [0] * 90) == []


@pytest.mark.parametrize(
    ("before", "after", "seconds", "held"),
    [(0, 15, 3, False), (0, 16, 3, True), (100, 90, 3, False), (2**32 - 1, 2, 3, False), (0, 10**7, 3, False)],
)
def test_more_than_five_replays_a_second_are_a_sign(before: int, after: int, seconds: int, held: bool) -> None:
    conditions = GpuConditions()
    _held(replace(HEALTHY, pcie_replays=before), conditions=conditions, now=0)
    found = _held(replace(HEALTHY, pcie_replays=after), conditions=conditions, now=seconds)
    assert found == ({"gpu-pcie 1": 1} if held else {})


def test_a_slow_pcie_link_counts_only_under_load() -> None:
    slow, narrow = replace(HEALTHY, pcie=(1, 5, 16, 16)), replace(HEALTHY, pcie=(5, 5, 8, 16))
    assert _held(slow) == {"gpu-pcie 3": 1}
    assert _held(narrow) == {"gpu-pcie 2": 1}
    assert _held(replace(slow, reasons=0x1)) == _held(replace(narrow, reasons=0x1)) == {}
    assert _held(replace(slow, reasons=None)) == {}
    assert _held(replace(HEALTHY, pcie=(0, 5, 0, 16))) == {}  # nonsense


def test_a_link_that_goes_down_is_named_and_one_that_never_was_up_is_not() -> None:
    conditions = GpuConditions()
    never_up = ((1, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0))
    assert _held(replace(HEALTHY, links=never_up), conditions=conditions, now=0) == {}
    down = replace(HEALTHY, links=((1, 0, 0, 0, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)))
    (sample,) = [each for each in conditions.samples(GpuReadings(1, [down]), 3.0) if each.held]
    assert (sample.kind, sample.code) == ("gpu-nvlink", 1)
    assert sample.text.endswith("NVLinks that are down: 1")


@pytest.mark.parametrize(
    ("after", "held"),
    [
        ((1, 4, 2, 1, 0), {"gpu-nvlink 2": 1}),
        ((1, 3, 3, 1, 0), {"gpu-nvlink 2": 1}),
        ((1, 3, 2, 301, 0), {}),
        ((1, 3, 2, 302, 0), {"gpu-nvlink 3": 1}),
        ((1, 3, 2, 1, 1), {"gpu-nvlink 4": 1}),
        ((1, 0, 0, 0, 0), {}),
        ((1, None, None, None, None), {}),
    ],
)
def test_the_counters_of_a_link(after: Link, held: dict[str, float]) -> None:
    conditions = GpuConditions()
    _held(HEALTHY, conditions=conditions, now=0)
    changed = replace(HEALTHY, links=(*HEALTHY.links[:7], after, *HEALTHY.links[8:])) if HEALTHY.links else HEALTHY
    samples = [each for each in conditions.samples(GpuReadings(1, [changed]), 3.0) if each.held]
    assert {f"{each.kind} {each.code}": each.held for each in samples} == held
    assert all(each.text.endswith(": 7") for each in samples)


@pytest.mark.parametrize(
    ("state", "result", "mask", "held"),
    [
        (0, 0, 0xFF, {}),  # this GPU has no fabric
        (3, 0, 0b10_10_10_10, {}),
        (3, 9, 0, {"gpu-fabric 1": 1}),
        (1, 0, 0, {"gpu-fabric 2": 1}),
        (2, 0, 0, {"gpu-fabric 2": 1}),
        (3, 0, 0b01, {"gpu-fabric 3": 1}),
        (3, 0, 0b01_00, {"gpu-fabric 4": 1}),
        (3, 0, 0b01_00_00, {"gpu-fabric 5": 1}),
        (3, 0, 0b01_00_00_00, {"gpu-fabric 6": 1}),
        (77, 0, 0b01, {}),
    ],
)
def test_the_fabric_says_how_it_is(state: int, result: int, mask: int, held: dict[str, float]) -> None:
    assert _held(replace(HEALTHY, fabric=(state, result, "4a1c", 7, mask))) == held


UNJUDGED = {("gpu-violation", 3), ("gpu-violation", 5)}
"""What no tool reads a fault from: it is logged."""


def test_each_condition_has_a_rule_and_a_source_in_the_policy() -> None:
    policy = Policy.load()
    conditions = GpuConditions()
    _held(HEALTHY, conditions=conditions)
    sampled = {(each.kind, each.code) for each in conditions.samples(GpuReadings(8, [HEALTHY]), 3.0, in_gres=8)}
    kinds = {kind for kind, _ in sampled} | {gpu_conditions.HANG}
    rules = {(rule.kind, rule.code) for rule in policy.rules() if rule.kind in kinds}
    assert rules == sampled | {(gpu_conditions.HANG, 0)}
    ignored = {each for each in sampled if policy.decide(*each).action == "ignore"}
    assert ignored == UNJUDGED
    unfit = {each for each in sampled if policy.decide(*each).action in ("unfit", "unfit_unless_explained")}
    assert unfit == {("gpu-missing", 1), *(("gpu-recovery", action) for action in (1, 2, 6, 7))}
    assert all(policy.decide(f"{kind}-over", code).action == "over" for kind, code in sampled)


_NUMBERS = st.none() | st.integers(-(2**70), 2**70)


_LINKS = st.none() | st.lists(st.tuples(st.integers(0, 9), _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS), max_size=4)
_READINGS = st.fixed_dictionaries(
    {
        **dict.fromkeys(
            (
                *("reasons", "thermal_violation_ns", "power_brake_ns", "margin_c", "slowdown_margin_c"),
                *("recovery_action", "ecc_uncorrected", "ecc_dram", "ecc_sram", "pcie_replays", "mig"),
            ),
            _NUMBERS,
        ),
        "pcie": st.none() | st.tuples(*[st.integers(-(2**40), 2**40)] * 4),
        "links": _LINKS,
        "fabric": st.none()
        | st.tuples(*[st.integers(-5, 9)] * 2, st.text(max_size=5), *[st.integers(-(2**40), 2**40)] * 2),
    }
)


@given(st.lists(st.tuples(_READINGS, st.floats(0, 1e9)), max_size=8))
def test_no_reading_gives_a_sample_that_makes_no_sense(rows: list[tuple[dict[str, Any], float]]) -> None:
    conditions = GpuConditions()
    for readings, now in rows:
        samples = list(conditions.samples(GpuReadings(1, [replace(HEALTHY, **readings)]), now, in_gres=1))
        assert all(0 <= each.held <= 1 for each in samples)
