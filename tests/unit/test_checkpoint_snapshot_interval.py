"""How far apart snapshots are with every="auto": what the commit leader chooses, and how ranks agree on it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rank_store import Store

from muster.checkpoint.store.commit.snapshot_interval import (
    ENOUGH_SAMPLES,
    MAX_PERIOD_STEPS,
    MIN_PERIOD_STEPS,
    NEGLIGIBLE_SHARE,
    SnapshotCosts,
    best_interval,
)
from muster.checkpoint.training.agent_connection import FIRST_PERIOD
from muster.checkpoint.training.agreements.joint_planning import RanksWithStore
from muster.checkpoint.training.due_steps import DueSteps, Interval

HOUR = 3600.0


def measured(stall_s: float, step_s: float, mtbf_s: float, snapshots: int = ENOUGH_SAMPLES + 1) -> SnapshotCosts:
    """Costs after some steps of rank 0, each with a snapshot."""
    costs, now = SnapshotCosts(mtbf_s), 1000.0
    for step in range(1, snapshots + 1):
        costs.note_step(step, now)
        costs.note_snapshot(stall_s, 1, auto=True)
        costs.note_committed(stall_s)
        now += stall_s + step_s
    return costs


def test_a_snapshot_that_costs_nothing_that_counts_is_taken_after_every_step() -> None:
    assert best_interval(8 * HOUR, cost_s=0.002, step_s=5.0) == 1
    assert best_interval(0.0, cost_s=0.002, step_s=5.0) == 1, "how often nodes fail is of no account then"
    assert best_interval(8 * HOUR, cost_s=0.0, step_s=0.1) == 1, "nothing is measured"


def test_the_interval_is_daly_s() -> None:
    """2 s of stall, 8 h between failures: √(2·2·28,800) = 339.4 s, and Daly's higher order 338.7."""
    assert best_interval(8 * HOUR, cost_s=2.0, step_s=1.0) == 338
    young = math.sqrt(2 * 2 * 8 * HOUR)
    assert abs(best_interval(8 * HOUR, cost_s=2.0, step_s=1.0) - young) < 0.01 * young


def test_rarer_failures_never_make_snapshots_rarer_than_their_cost_is_worth() -> None:
    costly = best_interval(1e9, cost_s=0.01, step_s=0.1)
    assert costly == round(0.01 / NEGLIGIBLE_SHARE / 0.1) == 100


@given(
    st.floats(1.0, 1e9, allow_nan=False),
    st.floats(1e-6, 100.0, allow_nan=False),
    st.floats(1e-4, 1000.0, allow_nan=False),
)
def test_no_interval_is_below_a_step_and_costlier_snapshots_are_not_more_frequent(
    mtbf_s: float, stall_s: float, step_s: float
) -> None:
    interval = best_interval(mtbf_s, stall_s, step_s)
    assert interval >= 1
    if 4 * stall_s < mtbf_s / 100:  # further on, Daly's interval approaches the time between failures
        assert best_interval(mtbf_s, 2 * stall_s, step_s) >= interval


def test_the_stall_of_a_snapshot_is_not_part_of_a_step() -> None:
    costs = measured(stall_s=0.5, step_s=2.0, mtbf_s=8 * HOUR)
    assert costs.step_s == pytest.approx(2.0)
    assert costs.stall_s == pytest.approx(0.5)


def test_an_interval_is_chosen_once_enough_is_measured() -> None:
    few = measured(stall_s=2.0, step_s=1.0, mtbf_s=8 * HOUR, snapshots=ENOUGH_SAMPLES - 1)
    assert few.choose() == 1
    assert measured(stall_s=2.0, step_s=1.0, mtbf_s=8 * HOUR).choose() == 338


def test_a_small_change_of_the_costs_changes_no_interval() -> None:
    costs = measured(stall_s=2.0, step_s=1.0, mtbf_s=8 * HOUR)
    assert costs.choose() == 338
    for _ in range(40):
        costs.note_committed(2.2)
    assert costs.choose() == 338
    for _ in range(40):
        costs.note_committed(8.0)
    assert costs.choose() > 600


def test_a_declared_phase_is_no_step() -> None:
    costs = measured(stall_s=0.0, step_s=1.0, mtbf_s=HOUR)
    costs.note_pause()
    costs.note_step(7, 5000.0)
    costs.note_step(8, 5001.0)
    assert costs.step_s == pytest.approx(1.0)


def test_a_period_is_long_enough_to_cost_nothing_and_short_enough_to_follow() -> None:
    assert SnapshotCosts().period() == MIN_PERIOD_STEPS
    assert measured(stall_s=0.0, step_s=0.5, mtbf_s=HOUR).period() == 60
    assert measured(stall_s=0.0, step_s=1e-6, mtbf_s=HOUR).period() == MAX_PERIOD_STEPS


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 200)), max_size=8),
    st.integers(0, 1000),
)
def test_all_ranks_call_the_same_steps_due(advice: list[tuple[int, int, int]], first: int) -> None:
    """Whatever rank 0's agent says, and when: ranks 1 and 2 are told nothing, and hear of it from rank 0 in time."""
    store = Store()
    ranks = [DueSteps(None, lambda rank=rank: RanksWithStore(rank, 3, store)) for rank in range(3)]  # type: ignore[misc]
    said = {at: (every, period) for every, period, at in advice}
    for step in range(first, first + 300):
        if step - first in said:
            ranks[0].advise(*said[step - first])
        # Rank 0 may be the last to call the step: within a step the others may be ahead of it.
        due = [rank.is_due(step) for rank in reversed(ranks)]
        assert len(set(due)) == 1, step
        assert step > first or due[0], "the first step is kept"
        assert len({rank.first_due(step - 3) for rank in ranks}) == 1


def test_what_rank_0_is_told_counts_from_the_look_after_the_next_on() -> None:
    rank = DueSteps(None, lambda: RanksWithStore(0, 2, Store()))
    rank.is_due(1)
    rank.advise(10, 20)
    due = [step for step in range(2, 60) if rank.is_due(step)]
    assert due == [*range(2, 1 + 2 * FIRST_PERIOD + 1), 27, 37, 47, 57]


def test_without_the_store_the_interval_stays() -> None:
    class Gone(Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    rank = DueSteps(None, lambda: RanksWithStore(0, 2, Gone()))
    assert all(rank.is_due(step) for step in range(1, 50))


def test_the_first_due_step_of_a_number() -> None:
    every_third = DueSteps(3)
    assert [every_third.first_due(step) for step in (0, 1, 3, 4)] == [0, 3, 3, 6]
    assert [step for step in range(1, 8) if every_third.is_due(step)] == [3, 6]
    assert Interval(10, 5).first_due(4) == 10
