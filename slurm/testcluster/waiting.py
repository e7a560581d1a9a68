"""Waits for a condition of the cluster, with a timeout and a description for the error message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """The condition did not hold in time."""


def allowed(seconds: float) -> float:
    """The deadline that is kept if `seconds` would do on an idle machine: MUSTER_PATIENCE times as long.

    The tests set it, so that a busy machine fails none of them: a deadline only ends a wait that would never end.
    """
    return seconds * float(os.environ.get("MUSTER_PATIENCE", "1"))


def wait_until(condition: Callable[[], T], timeout: float, what: str, every: float = 0.1) -> T:
    """Polls `condition` each `every` seconds until it is true, and returns its value.

    Raises:
        WaitTimeout: `timeout` seconds have passed; the message names `what` and the last value.
    """
    timeout = allowed(timeout)
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise WaitTimeout(f"not within {timeout:g} s: {what} (last answer: {answer!r})")
        time.sleep(every)
