"""A problem that lasts costs the log a line a minute, not one for each try."""

import logging

import pytest

from muster.daemon.host.lasting_problem import LastingProblem

LOG = logging.getLogger("muster.test")


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_hour_of_tries_costs_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    problem = LastingProblem(LOG, "Slurm answers again", clock)
    for _ in range(1800):
        problem.meet("Slurm does not answer")
        clock.now += 2.0
    problem.end()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["Slurm does not answer", "Slurm does not answer (for 60 s now)"]
    assert len(lines) == 61
    assert lines[-1] == "Slurm answers again, after 3600 s"


def test_other_words_are_logged_soon_but_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    problem = LastingProblem(LOG, "attached again", clock)
    for second in range(20):
        problem.meet("refused" if second % 2 else "no answer")
        clock.now += 1.0
    assert [record.getMessage() for record in caplog.records] == ["no answer", "refused (for 11 s now)"]


def test_the_end_of_no_problem_is_not_logged_and_a_new_problem_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    problem = LastingProblem(LOG, "over", clock)
    problem.end()
    for _ in range(2):
        problem.meet("again")
        problem.end()
    assert [record.getMessage() for record in caplog.records] == ["again", "over, after 0 s"] * 2
