"""A rank's stacks on request: when a signal comes, Python's faulthandler writes them into a memory file of the rank's.

A memory file, because the run folder may hang, and because a file for each rank would nearly always be there for
nothing. Its agent finds it among the rank's descriptors, and signals no process that has none: the signal would end it.
Standard library alone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress

SIGNAL = signal.SIGRTMAX - 6
"""Of its own: nothing that trains is known to use it."""
_NAME = "muster-stacks"


def offer() -> None:
    """Have this process write the stacks of all its threads whenever SIGNAL comes. Said twice it changes nothing; where
    the system has no descriptor left for it, there will be no stacks."""
    if find(os.getpid()) is None:
        with suppress(OSError):
            faulthandler.register(SIGNAL, os.memfd_create(_NAME), all_threads=True)


def find(pid: int) -> str | None:
    """The path of a process's stack file; None where it has none, or is gone."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):  # it was closed meanwhile
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):
                    return f"{folder}/{name}"
    return None
