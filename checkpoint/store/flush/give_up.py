"""The sign that a flush shall end early, and why. Threads that write look at it between two parts of a file."""

import threading

ABANDONED = "given up: the node that leads the flush has ended it, its own agent says why"
SLOTS_NEEDED = "the ranks need the memory that it holds for their last step before a stop"


class FlushCancellation(threading.Event):
    """Set when a flush shall be given up. `why`: in words, from then on."""

    why = "a newer flush was ordered"

    def set_because(self, why: str) -> None:
        """Give the flush up, if that has not been said already."""
        if not self.is_set():
            self.why = why
            self.set()
