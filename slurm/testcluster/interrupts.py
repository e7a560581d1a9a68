"""Defers interrupts of the main thread until an operation is complete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in the `with` block take effect after the block.

    An interrupt between a command's fork and the return of its pid would lose the pid. The command would continue, and
    nobody would wait for it before its work is undone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts only the main thread
        return
    received: list[int] = []
    which = (signal.SIGTERM, signal.SIGINT)  # restored in this order, so that no Ctrl-C arrives between the two
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in which}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
