"""How long a step may wait for a commit."""

import pytest

from muster.checkpoint.training.wait_budget import MAX_BUDGET_S, WaitBudget


def test_the_whole_allowance_is_there_from_the_start_and_is_used_up() -> None:
    waiting = WaitBudget(0.05)
    assert waiting.left_s(100.0) == MAX_BUDGET_S
    waiting.spent(MAX_BUDGET_S)
    assert waiting.left_s(100.0) == 0.0


def test_it_comes_back_as_a_share_of_the_time_and_is_never_more() -> None:
    waiting = WaitBudget(0.05)
    waiting.left_s(0.0)
    waiting.spent(MAX_BUDGET_S)
    assert waiting.left_s(10.0) == pytest.approx(0.5)
    assert waiting.left_s(1000.0) == MAX_BUDGET_S


def test_commits_that_are_always_too_slow_cost_no_more_than_the_share() -> None:
    """Each step takes 1 s, each commit for ever."""
    waiting, now, spent = WaitBudget(0.05), 0.0, 0.0
    for _ in range(1000):
        wait = waiting.left_s(now)
        waiting.spent(wait)
        spent += wait
        now += 1.0 + wait
    assert spent <= MAX_BUDGET_S + 0.05 * now


def test_without_a_share_nothing_is_waited_for() -> None:
    assert WaitBudget(0.0).left_s(0.0) == 0.0
