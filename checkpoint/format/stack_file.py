"""A rank's stacks on request: on a signal, Python's faulthandler writes them into a memory file of the rank.

It is a memory file because the run folder may hang, and because a file on disk for each rank would almost never be
used. The agent finds the memory file among the rank's descriptors. It signals no process without this file, because the
signal would end such a process. Uses the standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress

STACK_SIGNAL = signal.SIGRTMAX - 6
"""A signal that no training library is known to use."""

_NAME = "muster-stacks"


def register() -> None:
    """Have this process write the stacks of all its threads whenever it gets STACK_SIGNAL.

    A second call changes nothing. If the process has no descriptor left, it will write no stacks.
    """
    if find_stack_file(os.getpid()) is None:
        with suppress(OSError):
            faulthandler.register(STACK_SIGNAL, os.memfd_create(_NAME), all_threads=True)


def find_stack_file(pid: int) -> str | None:
    """The path of a process's stack file; None if the process has none, or has ended."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):  # the descriptor was closed meanwhile
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):
                    return f"{folder}/{name}"
    return None
