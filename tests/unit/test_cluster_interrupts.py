"""Ctrl-C is deferred during an operation that must not be cut short."""

import signal
from collections.abc import Iterator

import pytest

from muster.slurm.image.engine import deferred_interrupts


@pytest.fixture(autouse=True)
def _sigint() -> Iterator[None]:
    # Where a shell runs the tests in the background, SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupted(done: list[str], error: Exception | None = None) -> None:
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
        if error is not None:
            raise error


def test_an_interrupt_waits_for_the_end_of_the_operation() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted(done)
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_lost_in_an_interrupt() -> None:
    error = ValueError("the engine is gone")
    with pytest.raises(KeyboardInterrupt) as caught:
        _interrupted([], error)
    assert caught.value.__context__ is error


def test_without_an_interrupt_nothing_happens() -> None:
    with deferred_interrupts():
        done = True
    assert done
