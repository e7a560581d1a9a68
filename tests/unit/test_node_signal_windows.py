"""Conditions that count only when they last: when a signal is raised, and when it is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.node.repetitions import MAX_DEVICES
from muster.daemon.node.sensors.sensor import Observation, Sample
from muster.daemon.node.signal_windows import SignalRule, SignalWindows

RULE = SignalRule("gpu-throttle", 64, share=0.2, window_s=120, clear_share=0.05, clear_s=600)
AT_ONCE = SignalRule("gpu-memory", 3, share=0, window_s=0, clear_share=0, clear_s=60)


class Node:
    """Samples of one condition, a second apart, and what was reported."""

    def __init__(self, *rules: SignalRule) -> None:
        self.reported: list[Observation] = []
        self.windows = SignalWindows(self.reported.append, wall=lambda: 7.0)
        self.windows.use(rules or (RULE,))
        self.at = 1000.0

    def sample(self, held: float, seconds: int = 1, device: str = "0000:1b:00", code: int = 64) -> list[str]:
        """Feed so many samples. Returns the kinds that were reported meanwhile."""
        before = len(self.reported)
        for _ in range(seconds):
            self.at += 1
            kind = "gpu-throttle" if code == 64 else "gpu-memory"
            self.windows.report(Sample(kind, code, device, held, self.at, f"GPU 0: {held:g}"))
        return [observation.kind for observation in self.reported[before:]]


def test_a_condition_that_holds_for_its_share_of_the_window_raises_the_signal_once() -> None:
    node = Node()
    assert node.sample(0, 300) == []
    assert node.sample(1, 23) == []
    assert node.sample(1) == ["gpu-throttle"]
    assert node.reported == [
        Observation("gpu-throttle", 64, "0000:1b:00", "GPU 0: 1; for 24 s of the last 120 s", 7.0),
    ]
    assert node.sample(1, 3000) == []
    assert node.windows.lasting == {("gpu-throttle", 64, "0000:1b:00")}
    assert node.sample(0, 3000) == ["gpu-throttle-over"]
    assert node.windows.lasting == frozenset()


def test_a_condition_without_its_rule_lasts_no_more() -> None:
    node = Node()
    assert node.sample(1, 300) == ["gpu-throttle"]
    node.windows.use([AT_ONCE])
    assert node.windows.lasting == frozenset()


def test_a_condition_that_holds_for_less_raises_nothing() -> None:
    node = Node()
    for _ in range(200):
        assert node.sample(1, 23) + node.sample(0, 97) == []  # 23 s of any 120 s


def test_seconds_that_lie_apart_add_up_within_the_window() -> None:
    node = Node()
    assert [kind for _ in range(24) for kind in node.sample(0, 4) + node.sample(1)] == ["gpu-throttle"]


def test_a_counter_gives_parts_of_a_second() -> None:
    node = Node()
    assert node.sample(0.15, 500) == []
    assert node.sample(0.25, 120) == ["gpu-throttle"]


def test_a_signal_is_over_after_a_clear_window_only() -> None:
    node = Node()
    node.sample(1, 200)
    assert node.sample(0, 569) == []
    assert node.sample(0) == ["gpu-throttle-over"]  # 30 of 600 s may still hold
    assert node.sample(0, 3000) == []
    assert node.sample(1, 30) == ["gpu-throttle"]


def test_a_condition_that_comes_and_goes_raises_one_signal() -> None:
    node = Node()
    assert [kind for _ in range(50) for kind in node.sample(1, 60) + node.sample(0, 300)] == ["gpu-throttle"]


def test_time_without_a_sample_neither_raises_nor_clears() -> None:
    node = Node()
    node.sample(0, 10)
    for _ in range(100):  # an hour between two samples
        node.at += 3600
        assert node.sample(1) == []
    node.sample(1, 24)
    for _ in range(100):
        node.at += 3600
        assert node.sample(0) == []
    assert node.sample(0, 570) == ["gpu-throttle-over"]


def test_each_device_has_a_window_of_its_own() -> None:
    node = Node()
    assert node.sample(1, 20, device="0000:1b:00") + node.sample(1, 20, device="0000:2b:00") == []
    node.sample(1, 10, device="0000:2b:00")
    assert [observation.device for observation in node.reported] == ["0000:2b:00"]


def test_a_share_of_zero_raises_at_once() -> None:
    node = Node(AT_ONCE)
    assert node.sample(0, code=3) == []
    assert node.sample(1, code=3) == ["gpu-memory"]
    assert node.reported[0].text == "GPU 0: 1"
    assert node.sample(0, 59, code=3) == []
    assert node.sample(0, code=3) == ["gpu-memory-over"]


def test_a_sample_without_a_rule_has_no_effect_and_an_observation_needs_none() -> None:
    node = Node(AT_ONCE)
    assert node.sample(1, 300) == []
    lost = Observation("xid", 79, "0000:1b:00", "Xid 79", 1.0)
    node.windows.report(lost)
    assert node.reported == [lost]


def test_new_rules_keep_what_was_raised() -> None:
    node = Node()
    node.sample(1, 100)
    node.windows.use([RULE])
    assert node.sample(1, 100) == []
    node.windows.use([SignalRule("gpu-throttle", 64, 0.2, 120, 0, 10)])
    assert node.sample(0, 10) == ["gpu-throttle-over"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_rule_that_makes_no_sense_is_left_out(number: float) -> None:
    node = Node(SignalRule("gpu-throttle", 64, 0.2, number, 0, 10))
    assert node.sample(1, 300) == []


def test_a_sample_from_the_past_is_left_out() -> None:
    node = Node()
    node.sample(1, 20)
    node.at -= 500
    assert node.sample(1, 100) == []


@given(
    st.lists(st.tuples(st.floats(allow_nan=False), st.integers(1, 400), st.sampled_from([0, 0, 3, 1000])), max_size=8)
)
def test_raised_and_over_take_turns(phases: list[tuple[float, int, int]]) -> None:
    node = Node()
    for held, seconds, gap_s in phases:
        node.at += gap_s
        node.sample(held, seconds)
    kinds = [observation.kind for observation in node.reported]
    assert kinds == (["gpu-throttle", "gpu-throttle-over"] * len(kinds))[: len(kinds)]


COUNTED = SignalRule("pcie-aer", 1, share=0, window_s=60, clear_share=0, clear_s=600, count=3)


def _aer(at: float, device: str = "0000:1b:00.0") -> Observation:
    return Observation("pcie-aer", 1, device, "corrected error", at)


def _raised(*observations: Observation, node: Node | None = None) -> list[float]:
    node = node or Node(COUNTED)
    for observation in observations:
        node.windows.report(observation)
    return [observation.observed_s for observation in node.reported]


def test_what_repeats_is_raised_once_when_the_count_is_reached() -> None:
    node = Node(COUNTED)
    assert _raised(*map(_aer, (100, 130, 160, 161, 170, 700)), node=node) == [160]
    assert node.reported[0].text == "corrected error; 3 times within 60 s"


def test_what_repeats_too_slowly_is_not_raised() -> None:
    assert _raised(*(_aer(31 * number) for number in range(1, 100))) == []


def test_each_device_counts_for_itself() -> None:
    assert _raised(_aer(1), _aer(2), _aer(3, "0000:1c:00.0"), _aer(4, "0000:1d:00.0")) == []


def test_after_a_quiet_time_it_can_be_raised_again() -> None:
    assert _raised(*map(_aer, (1, 2, 3, 500, 1099, 1699, 1700, 1701, 1702))) == [3, 1701]


def test_a_clock_that_is_set_back_raises_nothing() -> None:
    assert _raised(*map(_aer, (1000, 1001, 1, 2))) == []
    assert _raised(*map(_aer, (1000, 1001, 1, 2, 3))) == [3]
    assert _raised(*map(_aer, (1000, 1001, 1002, 1, 2, 3, 4))) == [1002]


def test_observations_wait_for_the_first_rules() -> None:
    """A line that the policy counts is no signal by itself, even if it came before the coordinator answered."""
    reported: list[Observation] = []
    windows = SignalWindows(reported.append)
    lost = Observation("xid", 79, "0000:1b:00", "Xid 79", 1.0)
    for observation in (_aer(1), lost, _aer(2)):
        windows.report(observation)
    assert reported == []
    windows.use([COUNTED])
    assert reported == [lost]
    windows.report(_aer(3))
    assert [observation.kind for observation in reported] == ["xid", "pcie-aer"]


def test_a_coordinator_without_rules_lets_everything_pass() -> None:
    reported: list[Observation] = []
    windows = SignalWindows(reported.append)
    windows.report(_aer(1))
    windows.use([])
    assert len(reported) == 1


def test_many_devices_take_no_more_memory() -> None:
    node = Node(COUNTED)
    for number in range(3 * MAX_DEVICES):
        node.windows.report(_aer(1, f"{number}"))
    first, last = "0", f"{3 * MAX_DEVICES - 1}"
    assert _raised(_aer(2, first), _aer(3, first), node=node) == []
    assert _raised(_aer(2, last), _aer(3, last), node=node) == [3]
