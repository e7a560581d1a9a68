"""How much longer steps take while a version is copied."""

import random

import pytest

from muster.checkpoint.store.commit.copy_delay import ENOUGH_SAMPLES, CopyDelay
from muster.checkpoint.store.commit.snapshot_interval import SnapshotCosts

HOUR = 3600.0


def train(every: int, slow_steps: int, slower_s: float, versions: int, noise_s: float = 0.0) -> CopyDelay:
    """Steps of 1 s. Of `every` of them the first `slow_steps` are slower while something is copied."""
    measured, draw = CopyDelay(), random.Random(7)
    for _ in range(versions):
        measured.begin()
        for step in range(every):
            if step == slow_steps - 1:
                measured.end()
            measured.note_step(1.0 + slower_s * (step < slow_steps) + draw.gauss(0.0, noise_s), 1)
    return measured


@pytest.mark.parametrize("slow_steps", [1, 3])
def test_the_delay_is_that_of_all_steps_that_a_copy_touches(slow_steps: int) -> None:
    measured = train(10, slow_steps, 0.2, versions=ENOUGH_SAMPLES + 1)
    assert measured.delay_s == pytest.approx(0.2 * slow_steps)
    assert measured.clear_step_s == 1.0


def test_nothing_is_concluded_from_few_copies_or_without_steps_to_compare_with() -> None:
    assert train(10, 1, 0.2, versions=ENOUGH_SAMPLES - 1).delay_s == 0.0
    assert train(1, 1, 0.2, versions=50).delay_s == 0.0


def test_steps_that_differ_by_themselves_are_no_delay() -> None:
    assert train(10, 1, 0.0, versions=100, noise_s=0.2).delay_s == 0.0
    assert 0.5 < train(10, 1, 1.0, versions=100, noise_s=0.2).delay_s <= 1.1


def test_a_version_with_a_declared_phase_is_not_measured() -> None:
    measured = train(10, 1, 0.2, versions=ENOUGH_SAMPLES + 1)
    for _ in range(20):
        measured.begin()
        measured.note_step(9.0, 1)
        measured.pause()
        measured.note_step(1.0, 1)
    assert measured.delay_s == pytest.approx(0.2)


def test_the_delay_counts_for_the_interval_as_the_stall_does() -> None:
    """1 s of stall and 1 s of delay, 8 h between failures: as 2 s of stall, 338 steps of a second."""
    costs, now = SnapshotCosts(8 * HOUR), 0.0
    for step in range(100):
        if step % 10 == 1:
            costs.note_committed(1.0)  # within the step, which takes 2 s
            now += 1.0
        now += 1.0
        costs.note_step(step, now)
        if step % 10 == 0:
            costs.note_snapshot(1.0, 10, auto=True)
            now += 1.0
    assert (costs.stall_s, costs.delay_s, costs.step_s) == (1.0, 1.0, 1.0)
    assert costs.choose() == 338
