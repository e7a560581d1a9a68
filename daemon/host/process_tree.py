"""Processes of this host: who dies with whom, who is whose child, ending whole trees.

The door to prctl and /proc. Standard library alone: the warm process imports this before anything else.

Ranks die with their agent by a chain of parent-death signals (rank <- warm process <- agent <- guard), which the kernel
keeps even when the agent gets SIGKILL. What the ranks have started besides (data loaders, compilers) is handed by the
kernel to the nearest living subreaper above it, which ends it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have this process killed (SIGKILL) when its parent `parent` ends; ends it now where that has happened already.

    The setting outlives exec and is not inherited by children. It is about the parent's *thread*: the parent must
    start its children from its main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Have descendants whose parents end become children of this process (not inherited by its own children)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show for this process (at most 15 characters)."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def child_pids() -> list[int]:
    """Pids of this process's children, zombies included, those of other threads too."""
    try:
        return [
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_parent(os.getpid())


def thread_count() -> int:
    """Number of threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def kill(pid: int, *, group: bool = True) -> None:
    """SIGKILL `pid` and, where it leads one, its process group. A process that is gone already is fine."""
    if group:
        _signal(os.killpg, pid, signal.SIGKILL)
    _signal(os.kill, pid, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to one process; one that is gone already is fine."""
    _signal(os.kill, pid, signum)


def kill_orphans(keep: set[int], listed: Callable[[], list[int]] = child_pids) -> int:
    """SIGKILL every child of this process but `keep`, reap what has ended, and return how many are left.

    Call again after SIGCHLD until 0: the children of the ended arrive only then.
    """
    while True:
        ending = [pid for pid in listed() if pid not in keep]
        for pid in ending:
            kill(pid, group=False)
        # Who ended since they were listed has left us children that are not on the list.
        if not any([_reap(pid) for pid in ending]):
            return len(ending)


def exit_status(status: int) -> int:
    """A wait status as Muster reports it: 0 to 255, or minus the number of the signal."""
    return os.waitstatus_to_exitcode(status)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _signal(how: object, pid: int, signum: int) -> None:
    try:
        how(pid, signum)  # type: ignore[operator]
    except (ProcessLookupError, PermissionError):
        pass  # gone; a group may hold a process of another user, which is not ours to end


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _children_by_parent(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command's name stands in parentheses and may hold anything; state and parent follow it.
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            found.append(int(name))
    return found
