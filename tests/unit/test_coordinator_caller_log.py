"""The log of what callers do wrong has a bound for each caller, and hides no other caller."""

import logging

import pytest

from muster.daemon.coordinator.services.caller_limits import LINE_INTERVAL_S, LINES_AT_ONCE, MOST_LINE_CHARS, CallerLog

STRANGER, ANOTHER = 1002, 1003


class Hand:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def log(hand: Hand) -> CallerLog:
    return CallerLog(logging.getLogger("muster.test"), hand)


def test_one_caller_fills_no_log_and_hides_no_other(log: CallerLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10 * LINES_AT_ONCE):
        log.log(logging.WARNING, STRANGER, f"refusal {number}")
    log.log(logging.WARNING, ANOTHER, "the other one")
    said = [record.getMessage() for record in caplog.records]
    assert said == [*(f"refusal {number}" for number in range(LINES_AT_ONCE)), "the other one"]


def test_a_later_line_says_how_many_were_left_out(log: CallerLog, hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(LINES_AT_ONCE + 7):
        log.log(logging.WARNING, STRANGER, "refused")
    hand.now += LINE_INTERVAL_S
    log.log(logging.WARNING, STRANGER, "refused once more")
    assert caplog.messages[-1] == "refused once more (7 lines about this caller were left out before)"
    hand.now += LINE_INTERVAL_S
    log.log(logging.WARNING, STRANGER, "and again")
    assert caplog.messages[-1] == "and again"


def test_a_line_that_quotes_a_whole_message_is_cut(log: CallerLog, caplog: pytest.LogCaptureFixture) -> None:
    log.log(logging.WARNING, STRANGER, "x" * 4_000_000)
    assert caplog.messages == ["x" * MOST_LINE_CHARS + "..."]
