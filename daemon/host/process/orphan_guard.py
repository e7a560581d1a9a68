"""The guard: the agent's parent process. It outlives the agent and kills what the agent leaves behind.

Ranks die with their agent by parent-death signals. Processes that ranks have started (data loaders, compilers) do not:
they would continue to write files and hold memory. The kernel makes them children of the guard, which kills them. The
guard does nothing else: it imports nothing, opens nothing and has one thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from muster import exit_codes
from muster.daemon.host import process_tree
from muster.daemon.host.process import step_signals

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""An agent ignores the last two, which Slurm may send to all processes of a step."""
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.01


def run_guarded(agent: Callable[[], int]) -> int:
    """Run `agent` in a child process. Return its exit code (128 + N after signal N) when no process of it is left.

    Call this before any thread is started: the child is a fork.
    """
    process_tree.adopt_orphans()
    step_signals.ignore()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        process_tree.die_with_parent(guard)
        process_tree.adopt_orphans()
        return agent()
    process_tree.set_process_name("muster-guard")
    for number in _FORWARDED_SIGNALS:
        signal.signal(number, lambda signum, _: process_tree.send_signal(child, signum))
    code = process_tree.exit_status(os.waitpid(child, 0)[1])
    _kill_orphans()
    return exit_codes.of_shell(code)


def _kill_orphans() -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while process_tree.kill_orphans(set()) > 0 and time.monotonic() < deadline:
        time.sleep(_POLL_S)
