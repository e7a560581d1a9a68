"""Native stacks of hanging ranks, with the C functions below Python: py-spy prints them, where it is installed.

py-spy (github.com/benfred/py-spy) stops a process for the time in which it reads its stacks. It reads them from
outside, so that a rank in which no Python runs has them, too, and it names the thread that holds the GIL. The kernel
lets a process read only its own user's processes. With kernel.yama.ptrace_scope 1 these must have allowed it, which
ranks do (`process_tree.allow_tracers_below`); with 2 or 3 there are no native stacks.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Collection

MAX_TEXT_BYTES = 1 << 18
"""Bytes of one process's stacks."""
_LEAST_WAIT_S = 0.01


def find_py_spy() -> str:
    """The path of py-spy in this process's PATH; empty if it is not installed."""
    return shutil.which("py-spy") or ""


def native_stacks(py_spy: str, pids: Collection[int], until: float) -> dict[int, str]:
    """The stacks of each process, or why there are none. Blocks.

    Args:
        py_spy: the program.
        pids: all are read at the same time.
        until: the monotonic time by which the answer is needed, in seconds. py-spy is ended then.
    """
    running = {pid: _start([py_spy, "dump", "--native", "--pid", str(pid)]) for pid in pids}
    return {pid: _answer(process, until) for pid, process in running.items()}


def _start(command: list[str]) -> subprocess.Popen[bytes] | str:
    """The running process, or why it does not run."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return f"{command[0]} can't be run: {error.strerror}\n"


def _answer(process: subprocess.Popen[bytes] | str, until: float) -> str:
    if isinstance(process, str):
        return process
    with process:
        try:
            output, _ = process.communicate(timeout=max(_LEAST_WAIT_S, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return "py-spy needs longer than a fence waits\n"
    return output[:MAX_TEXT_BYTES].decode(errors="replace")
