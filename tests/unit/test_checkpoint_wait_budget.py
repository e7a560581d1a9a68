"""How long a step may wait for a commit."""

import pytest

from muster.checkpoint.training.wait_budget import MAX_BUDGET_S, WaitBudget


def test_the_whole_budget_is_there_from_the_start_and_is_used_up() -> None:
    budget = WaitBudget(0.05)
    assert budget.remaining_s(100.0) == MAX_BUDGET_S
    budget.spend(MAX_BUDGET_S)
    assert budget.remaining_s(100.0) == 0.0


def test_the_budget_grows_by_a_share_of_the_time_up_to_its_maximum() -> None:
    budget = WaitBudget(0.05)
    budget.remaining_s(0.0)
    budget.spend(MAX_BUDGET_S)
    assert budget.remaining_s(10.0) == pytest.approx(0.5)
    assert budget.remaining_s(1000.0) == MAX_BUDGET_S


def test_commits_that_are_always_too_slow_cost_no_more_than_the_share() -> None:
    """Each step takes 1 s, and no commit ever ends."""
    budget, now, spent = WaitBudget(0.05), 0.0, 0.0
    for _ in range(1000):
        wait = budget.remaining_s(now)
        budget.spend(wait)
        spent += wait
        now += 1.0 + wait
    assert spent <= MAX_BUDGET_S + 0.05 * now


def test_without_a_share_there_is_no_waiting() -> None:
    assert WaitBudget(0.0).remaining_s(0.0) == 0.0
