"""Signs of life: once a second a thread tells the agent that this process runs Python.

If one thread keeps the GIL for ever, or if the process is stopped, this thread is silent. The other ranks wait for that
rank in a collective, which releases the GIL, so that their threads go on: the silent rank is the one that hangs.

The thread holds no other thread up: it sends without waiting, and takes the GIL for some microseconds each second.
"""

import atexit
import os
import threading
from collections.abc import Callable

INTERVAL_S = 1.0
"""Seconds between two signs."""


class SignsOfLife:
    """The thread of one process.

    Args:
        send: sends one sign; True for the last one. Returns whether another one is of use.
        interval_s: seconds between two signs.
    """

    def __init__(self, send: Callable[[bool], bool], interval_s: float = INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-signs-of-life", daemon=True)

    def start(self) -> None:
        """Send the first sign now, in this thread, and one each second until the interpreter ends."""
        if self._send(False):
            self._thread.start()
        atexit.register(self._end)  # the interpreter stops daemon threads before it has ended

    def stop(self) -> None:
        """Send no more signs."""
        atexit.unregister(self._end)
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s) and self._send(False):
            pass

    def _end(self) -> None:
        if os.getpid() == self._pid:  # not in a process that was forked from this one
            self._ended.set()
            self._send(True)
