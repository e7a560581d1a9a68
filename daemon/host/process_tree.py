"""Processes of this host: which process dies with which, which is whose child, and how to kill whole trees.

Only this module uses prctl and /proc for processes. Uses the standard library only, because the zygote imports it
before anything else.

Ranks die with their agent by a chain of parent-death signals (rank <- zygote <- agent <- guard). The kernel sends these
signals even after the agent got SIGKILL. Other processes that ranks have started (data loaders, compilers) become
children of the nearest living subreaper above them, which kills them.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel send SIGKILL to this process when its parent `parent` ends. If the parent has ended already, end
    now.

    The setting survives exec; children do not inherit it. It refers to the parent's *thread*: the parent must start its
    children from its main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process a subreaper: descendants become its children when their parents end. Children do not inherit
    this."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_tracers_below(pid: int) -> None:
    """Where Yama restricts ptrace to ancestors, let `pid` and its descendants of the same user trace this process, too:
    py-spy reads stacks so. It survives exec, and children do not inherit it. Without Yama it changes nothing."""
    with suppress(OSError):  # a kernel without Yama
        _prctl(_PR_SET_PTRACER, pid)


def set_process_name(name: str) -> None:
    """Set the process name that ps and top show (at most 15 characters)."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def child_pids() -> list[int]:
    """Pids of this process's children, with zombies and with children of other threads."""
    try:
        return [
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_parent(os.getpid())


def thread_count() -> int:
    """The number of threads of this process, with native threads."""
    return len(os.listdir("/proc/self/task"))


def kill(pid: int, *, group: bool = True) -> None:
    """SIGKILL `pid` and, if `pid` leads a process group, the group. A missing process is no error."""
    if group:
        _signal(os.killpg, pid, signal.SIGKILL)
    _signal(os.kill, pid, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to one process. A missing process is no error."""
    _signal(os.kill, pid, signum)


def kill_orphans(keep: set[int], listed: Callable[[], list[int]] = child_pids) -> int:
    """SIGKILL every child of this process except `keep`, reap those that have ended, and return how many are left.

    Call again after SIGCHLD until the result is 0: grandchildren become children only when their parent has ended.
    """
    while True:
        ending = [pid for pid in listed() if pid not in keep]
        for pid in ending:
            kill(pid, group=False)
        # A process that ended after the list was made has left children that are not on the list.
        if not any([_reap(pid) for pid in ending]):
            return len(ending)


def describe_unkilled(leader: int) -> list[str]:
    """What SIGKILL has not ended of a process group, in words: each process with its pid and name, its state, and the
    kernel function in which it waits. Those that have ended, and are only not reaped yet, count if there are no others.

    Of a process with several threads, one in state D speaks for it: SIGKILL waits for that one. A child in a session of
    its own is in no group of `leader`: once `leader` has ended, it is a child of the subreaper, in state D.
    """
    adopter = ""
    with suppress(OSError):
        _, _, state, adopter, *_ = _stat(Path("/proc", str(leader)))
        adopter = adopter if state == "Z" else ""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if not entry.name.isdigit():
                continue
            _, name, _, parent, group, *_ = _stat(entry)
            thread = min((entry / "task").iterdir(), key=lambda thread: _stat(thread)[2] != "D", default=entry)
            state = _stat(thread)[2]
            if int(group) == leader or (parent == adopter and state == "D"):
                function = (thread / "wchan").read_text().strip("0")
                where = f", in {function}" if function else ""
                found[f"process {entry.name} ({name}) is in state {state}{where}"] = state
    return [words for words, state in found.items() if state != "Z"] or list(found)


def exit_status(status: int) -> int:
    """Convert a wait status: 0 to 255, or minus the number of the signal."""
    return os.waitstatus_to_exitcode(status)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _signal(send: object, pid: int, signum: int) -> None:
    try:
        send(pid, signum)  # type: ignore[operator]
    except (ProcessLookupError, PermissionError):
        pass  # gone, or the group holds a process of another user, which Muster must not kill


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def read_environment(text: bytes) -> dict[str, str]:
    """The variables in `text`: NAME=VALUE each, separated by NUL, as in /proc/PID/environ."""
    pairs = (os.fsdecode(entry).partition("=") for entry in text.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if name}


def environment_at_start() -> dict[str, str]:
    """The environment in which this process was started. Since then it may have set variables, as for gRPC."""
    return read_environment(Path("/proc/self/environ").read_bytes())


def any_with_environment(*entries: str) -> bool:
    """Whether a process of this user was started with all of these variables: NAME=VALUE, or the beginning of one."""
    wanted = [b"\0" + entry.encode() for entry in entries]
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and _has_all(b"\0" + Path("/proc", name, "environ").read_bytes(), wanted):
                return True
    return False


def _has_all(environment: bytes, wanted: list[bytes]) -> bool:
    return all(entry in environment for entry in wanted)


def _children_by_parent(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if name.isdigit() and int(_stat(Path("/proc", name))[3]) == parent:
                found.append(int(name))
    return found


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat, without the parentheses around the command's name, which may contain anything: pid,
    name, state, parent, process group and others. The kernel cuts the name at 15 bytes, also within a character."""
    before, _, after = (process / "stat").read_text(errors="replace").rpartition(")")
    pid, _, name = before.partition(" (")
    return [pid, name, *after.split()]
