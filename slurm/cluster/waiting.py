"""Waiting for a condition of the cluster, with a deadline and a name for what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """What was waited for did not come about in time."""


def wait_until(condition: Callable[[], T], timeout: float, what: str, every: float = 0.05) -> T:
    """Poll `condition` each `every` seconds until it is true, and return what it returned.

    Raises `WaitTimeout` naming `what` and the last answer after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise WaitTimeout(f"not within {timeout:g} s: {what} (last answer: {answer!r})")
        time.sleep(every)
