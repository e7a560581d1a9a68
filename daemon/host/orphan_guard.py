"""The guard: the agent's parent, which outlives it to end whatever it leaves behind.

Ranks die with their agent by parent-death signals; what ranks have started by themselves (data loaders, compilers)
does not, and would go on to write files and hold memory. The kernel hands it to the guard, which ends it. The guard
does nothing
else: it imports nothing, opens nothing and holds no thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from muster.daemon.host import process_tree

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Slurm and terminals send these to every process; an agent takes no notice of any.
_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CLEAN_S = 10.0
_LOOK_AGAIN_S = 0.01


def run_guarded(agent: Callable[[], int]) -> int:
    """Run `agent` in a child; returns its exit code (128 + signal where one ended it) once nothing of it is left.

    To be called before any thread is started: the child is a fork.
    """
    process_tree.adopt_orphans()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        process_tree.die_with_parent(guard)
        process_tree.adopt_orphans()
        return agent()
    process_tree.set_process_name("muster-guard")
    for number in _FORWARDED:
        signal.signal(number, lambda signum, _: process_tree.send_signal(child, signum))
    code = process_tree.exit_status(os.waitpid(child, 0)[1])
    _clean()
    return code if code >= 0 else 128 - code


def _clean() -> None:
    deadline = time.monotonic() + _CLEAN_S
    while process_tree.kill_orphans(set()) > 0 and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
