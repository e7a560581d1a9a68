"""Interrupts of the main thread that wait until what is under way is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that come in the `with` block have their effect after it.

    Between a command's fork and the moment in which its number is known an interrupt would lose it: it would go on, and
    nobody would wait for it before its work is undone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    came: list[int] = []
    which = (signal.SIGTERM, signal.SIGINT)  # restored in that order: no Ctrl-C comes between the two
    before = {number: signal.signal(number, lambda sent, _: came.append(sent)) for number in which}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
