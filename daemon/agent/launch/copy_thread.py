"""A thread that copies the output of ranks while it grows, and what is left of it when they have ended."""

from __future__ import annotations

import logging
import threading

from muster.daemon.agent.launch.output_target import OutputTarget

_CLOSE_S = 20.0
"""Seconds without any progress after which the rest is not copied: nobody reads it."""
log = logging.getLogger(__name__)


class CopyThread:
    """Calls `copy_once` until it is told to end, and then until nothing is left.

    Args:
        poll_s: seconds to wait when there was nothing to copy.
        target: where it goes.
    """

    def __init__(self, name: str, poll_s: float, target: OutputTarget) -> None:
        self._poll_s, self._target = poll_s, target
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def copy_once(self) -> bool:
        """Copy a part of what is new. Return whether there may be more."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def close(self) -> None:
        """All ranks have ended: copy what is left, for as long as somebody reads it."""
        self._ending.set()
        before = -1
        while self._thread.is_alive() and before != self._target.writes:
            before = self._target.writes
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("nobody has read the output for %d s: its end is in the logs of the ranks alone", _CLOSE_S)

    def copy_rest(self) -> None:
        """Copy what is left, in the thread of the caller."""
        self._ending.set()
        while self.copy_once():
            pass

    def _run(self) -> None:
        while not self._ending.wait(0 if self.copy_once() else self._poll_s):
            pass
        self.copy_rest()
