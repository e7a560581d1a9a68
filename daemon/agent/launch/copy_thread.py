"""A thread that copies the output of ranks while it grows, and what is left of it when they have ended."""

from __future__ import annotations

import threading

_CLOSE_S = 20.0
"""Seconds in which the rest is copied at the end, if somebody reads it."""


class CopyThread:
    """Calls `copy_once` until it is told to end, and then until nothing is left.

    Args:
        poll_s: seconds to wait when there was nothing to copy.
    """

    def __init__(self, name: str, poll_s: float) -> None:
        self._poll_s = poll_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def copy_once(self) -> bool:
        """Copy a part of what is new. Return whether there may be more."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def close(self) -> None:
        """All ranks have ended: copy what is left, for some seconds at most."""
        self._ending.set()
        self._thread.join(_CLOSE_S)

    def copy_rest(self) -> None:
        """Copy what is left, in the thread of the caller."""
        self._ending.set()
        while self.copy_once():
            pass

    def _run(self) -> None:
        while not self._ending.wait(0 if self.copy_once() else self._poll_s):
            pass
        self.copy_rest()
