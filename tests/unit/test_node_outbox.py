"""Signals that wait for the coordinator."""

from dataclasses import replace

import pytest

from muster.daemon.node.outbox import Outbox
from muster.daemon.node.sensors.sensor import Observation


def _seen(code: int, device: str = "a") -> Observation:
    return Observation("xid", code, device, f"Xid {code} on {device}", 0.0)


def _take_all(box: Outbox) -> list[int]:
    codes = []
    while observation := box.next_unsent():
        codes.append(observation.code)
    return codes


def test_each_is_sent_once_a_stream_until_it_is_confirmed() -> None:
    box = Outbox()
    first, second = _seen(79), _seen(48)
    box.put(first)
    box.put(second)
    assert _take_all(box) == [79, 48]
    assert _take_all(box) == []
    box.confirm(first)
    box.rewind()
    assert _take_all(box) == [48]
    box.confirm(second)
    assert len(box) == 0


def test_a_storm_of_one_error_waits_as_one() -> None:
    box = Outbox()
    box.put(_seen(79))
    for _ in range(5000):
        box.put(_seen(31))
    assert _take_all(box) == [79, 31]


def test_a_repetition_after_sending_is_sent_too() -> None:
    box = Outbox()
    first, again = _seen(79), _seen(79)
    box.put(first)
    box.next_unsent()
    box.put(again)
    box.confirm(first)  # the answer to the first: the second still waits
    assert box.next_unsent() is again


def test_a_signal_that_returned_is_not_over() -> None:
    """While the coordinator is away a signal is raised, over, and raised again: the last word counts."""
    box = Outbox()
    for kind in ("gpu-throttle", "gpu-throttle-over", "gpu-throttle"):
        box.put(replace(_seen(64), kind=kind))
    box.put(replace(_seen(64, "b"), kind="gpu-throttle-over"))
    sent = []
    while observation := box.next_unsent():
        sent.append((observation.kind, observation.device))
    assert sent == [("gpu-throttle", "a"), ("gpu-throttle-over", "b")]


def test_a_signal_that_is_over_is_told_with_its_end() -> None:
    box = Outbox()
    box.put(replace(_seen(64), kind="gpu-throttle"))
    box.put(replace(_seen(64), kind="gpu-throttle-over"))
    assert len(box) == 2


def test_a_full_box_drops_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    box = Outbox(limit=3)
    for code in (1, 2, 3, 4):
        box.put(_seen(code))
    assert _take_all(box) == [2, 3, 4]
    assert "3 signals wait for the coordinator; dropped: Xid 1 on a" in caplog.text


def test_news_is_set_while_something_is_to_be_sent() -> None:
    box = Outbox()
    assert not box.changed.is_set()
    box.put(_seen(1))
    assert box.changed.is_set()
    _take_all(box)
    assert not box.changed.is_set()
    box.rewind()
    assert box.changed.is_set()
