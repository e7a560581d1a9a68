"""Which curves of a loss have spikes and plateaus."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse, LossRule
from muster.daemon.coordinator.core.losses.loss_watch import LossFinding, LossKind, LossWatch

RULE = LossRule()
Curve = Callable[[int], float]


def curve(seed: int, noise: float = 0.02, floor: float = 1.8, exponent: float = 0.3) -> Curve:
    """A loss as large trainings have it: a power law with noise."""
    chance = random.Random(seed)
    return lambda step: (floor + 8 * step**-exponent) * (1 + chance.gauss(0, noise))


def found_in(values: Iterable[tuple[int, float]], rule: LossRule = RULE, watch: LossWatch | None = None,
             generation: int = 1, node: str = "n1") -> list[LossFinding]:  # fmt: skip
    watch, found = watch or LossWatch(), []
    for step, value in values:
        watch.add(generation, node, step, value)
        found += watch.judge(rule)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_a_loss_that_falls_with_noise_shows_nothing_in_100_000_steps(seed: int, noise: float) -> None:
    loss = curve(seed, noise)
    assert found_in((step, loss(step)) for step in range(1, 100_001)) == []


@pytest.mark.parametrize("deviations", [15, 40])
def test_a_spike_is_found_once_with_its_first_step(deviations: int) -> None:
    loss = curve(1)
    values = [(step, loss(step)) for step in range(1, 2001)]
    usual = 1.8 + 8 * 1000**-0.3
    height = usual * (1 + 0.02 * deviations)
    values[1000:1010] = [(step, height) for step in range(1001, 1011)]
    (spike,) = found_in(values)
    assert (spike.kind, spike.node, spike.step, spike.ordinary_step) == (LossKind.SPIKE, "n1", 1001, 1000)
    assert spike.newest_step == 1000 + RULE.in_a_row
    assert spike.value == height
    assert spike.usual == pytest.approx(usual, rel=0.1)


def test_single_odd_values_are_no_spike_unless_the_rule_says_so() -> None:
    loss = curve(2)
    values = [(step, 20.0 if step % 100 == 50 else loss(step)) for step in range(1, 2001)]
    assert found_in(values) == []
    found = found_in(values, replace(RULE, in_a_row=1))
    assert [one.step for one in found] == list(range(50, 2000, 100))


def test_nothing_is_said_before_half_of_the_window() -> None:
    assert found_in((step, 20.0 if step > 15 else 2.0) for step in range(1, 32)) == []
    found = found_in((step, 20.0 if step > 32 else 2.0) for step in range(1, 40))
    assert [one.step for one in found] == [33]


def test_a_spike_that_began_while_too_few_values_were_known_has_its_first_step() -> None:
    """As after a restart of the coordinator."""
    (spike,) = found_in((step, 20.0 if step > 20 else 2.0) for step in range(1, 40))
    assert (spike.step, spike.ordinary_step, spike.newest_step) == (21, 20, 35)


def test_a_slow_drift_upwards_is_no_spike() -> None:
    chance = random.Random(3)
    values = [(step, 2.0 * 1.002**step * (1 + chance.gauss(0, 0.02))) for step in range(1, 1500)]
    assert [one for one in found_in(values) if one.kind is LossKind.SPIKE] == []


def test_a_new_level_is_one_spike_and_then_ordinary() -> None:
    loss = curve(4)
    values = [(step, loss(step) + 5 * (step > 500)) for step in range(1, 1001)]
    assert [one.step for one in found_in(values)] == [501]
    assert [one.step for one in found_in([*values, *((step, 30.0) for step in range(1001, 1006))])] == [501, 1001]


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0])
def test_a_constant_loss_is_on_a_plateau_and_has_no_spike(value: float) -> None:
    found = found_in((step, value) for step in range(1, 20_001))
    assert [one.kind for one in found] == [LossKind.PLATEAU]
    assert found[0].newest_step >= RULE.plateau_values


def test_a_loss_that_was_zero_all_the_time_has_no_measure_of_what_is_large() -> None:
    assert found_in((step, 0.0 if step < 100 else 1e-9) for step in range(1, 110)) == []


def test_values_that_are_not_finite_are_left_out() -> None:
    loss = curve(5)
    odd = {7: math.nan, 11: math.inf, 13: -math.inf}
    assert found_in((step, odd.get(step % 20, loss(step))) for step in range(1, 5000)) == []


def test_a_plateau_is_said_once_and_again_after_progress() -> None:
    chance = random.Random(6)

    def loss(step: int) -> float:
        falls = 3.0 - min(step, 2000) / 2000 if step < 10_000 else 2.0 - min(step - 10_000, 10_000) / 20_000
        return falls * (1 + chance.gauss(0, 0.01))

    found = found_in((step, loss(step)) for step in range(1, 80_001))
    assert [one.kind for one in found] == [LossKind.PLATEAU, LossKind.PLATEAU]
    assert 2000 < found[0].step < 10_000
    assert found[1].step > 20_000


def test_plateaus_are_counted_in_values_and_not_in_steps() -> None:
    """The coordinator sees a value each few seconds, and the steps between two of them may be any number."""
    found = found_in((1 + 7 * number, 2.0) for number in range(10_000))
    assert [one.kind for one in found] == [LossKind.PLATEAU]
    assert found_in(((step, 2.0) for step in range(1, 20_000)), replace(RULE, plateau_values=0)) == []


def test_steps_that_are_done_again_are_compared_with_those_before_them() -> None:
    watch, loss = LossWatch(), curve(7, exponent=0.9)
    assert found_in(((step, loss(step)) for step in range(1, 3001)), watch=watch) == []
    again = [(step, loss(step)) for step in range(200, 3000)]  # the loss is higher there than it was lately
    assert found_in(again, watch=watch, generation=2, node="n2") == []
    assert found_in(((step, 2.0 + 10 * (step > 3010)) for step in range(3000, 3020)), watch=watch, generation=3) != []


def test_repeated_restarts_make_no_plateau() -> None:
    watch, loss = LossWatch(), curve(8)
    for generation in range(1, 40):
        values = ((step, loss(step)) for step in range(50 * generation, 50 * generation + 500))
        assert found_in(values, watch=watch, generation=generation) == []


def test_one_node_is_watched_and_each_step_once() -> None:
    watch = LossWatch()
    loss = curve(9)
    for step in range(1, 200):
        watch.add(1, "n1", step, loss(step))
        watch.add(1, "n2", step, 50.0)
        watch.add(1, "n1", step, 50.0)
        watch.add(0, "n1", step + 1, 50.0)
        assert watch.judge(RULE) == []
    assert watch.ordinary_step == 199


def test_a_job_chooses_single_keys_over_those_of_the_site() -> None:
    site = replace(RULE, spike=LossResponse.STOP, window=32)
    chosen = LossChoice(deviations=20.0, plateau_values=0).over(site)
    assert chosen == replace(site, deviations=20.0, plateau_values=0)
