"""What the readings of the GPUs say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.nvml.nvml_process import GpuReading, GpuReadings
from muster.daemon.node.sensors import gpu_conditions
from muster.daemon.node.sensors.gpu_conditions import GpuConditions

HEALTHY = GpuReading(
    *(3, "0000:3b:00", "GPU-4a1c", "NVIDIA H100 80GB HBM3"),
    reasons=0,
    thermal_violation_ns=10**9,
    temperature_c=91,
    power_mw=350_000,
    ecc_uncorrected=2,
    remapped=(1, 0, 0, 0),
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
    assert len(samples) == 11
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
def test_a_counter_of_violations_gives_a_part_of_the_time(before_ns: int, after_ns: int, held: float | None) -> None:
    conditions = GpuConditions()
    _held(replace(HEALTHY, thermal_violation_ns=before_ns), conditions=conditions, now=100.0)
    after = GpuReadings(1, [replace(HEALTHY, thermal_violation_ns=after_ns)])
    found = [each.held for each in conditions.samples(after, 101.0) if each.kind == gpu_conditions.VIOLATION]
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
            ("nvml-error", 16): 0,
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


def test_each_condition_has_a_rule_and_a_source_in_the_policy() -> None:
    policy = Policy.load()
    conditions = GpuConditions()
    _held(HEALTHY, conditions=conditions)
    sampled = {(each.kind, each.code) for each in conditions.samples(GpuReadings(1, [HEALTHY]), 1.0)}
    assert {(rule.kind, rule.code) for rule in policy.rules()} == sampled | {(gpu_conditions.HANG, 0)}
    assert {policy.decide(*each).action for each in sampled} == {"degraded"}
    assert all(policy.decide(f"{kind}-over", code).action == "ignore" for kind, code in sampled)


_NUMBERS = st.none() | st.integers(-(2**70), 2**70)


@settings(deadline=None)
@given(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS, st.floats(0, 1e9)), max_size=8))
def test_no_reading_gives_a_sample_that_makes_no_sense(
    rows: list[tuple[int | None, int | None, int | None, float]],
) -> None:
    conditions = GpuConditions()
    for reasons, violation_ns, ecc, now in rows:
        gpu = replace(HEALTHY, reasons=reasons, thermal_violation_ns=violation_ns, ecc_uncorrected=ecc)
        assert all(0 <= each.held <= 1 for each in conditions.samples(GpuReadings(1, [gpu]), now))
