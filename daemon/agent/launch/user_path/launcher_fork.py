"""A launcher of PyTorch is forked into the warm processes of its node: it has imported PyTorch already.

`sitecustomize.py` asks for it when torchrun hands over. A fork leaves torchrun's frames, and goes on
where a new interpreter begins: as the hook of an exception that nothing catches. There it takes back what a rank must
not see of the launcher, and becomes a zygote.

A rank must not be able to tell the difference from a zygote that was started anew. So a launcher is forked only if it
is torchrun as torch ships it, in the interpreter and with the flags of its ranks, and if it has no thread, has opened
nothing and has not changed its folder. The agent starts a zygote anew where no fork has come, or where the fork has
imported with another environment than its ranks have (`handover.Handover.imports_as`).

Standard library and syntax of Python 3.9: it runs in the user's interpreter.
"""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

TORCHRUN = "torch.distributed.run"
_ERRORS = "torch.distributed.elastic.multiprocessing.errors"
_OF_TORCHRUN = {"__main__", "runpy", TORCHRUN, "torch.distributed.launcher.api", _ERRORS}
"""Modules whose frames a fork may leave: they have nothing to finish."""
_OF_PROGRAM = {"main", "re", "sys"}
"""All names in the program `torchrun` that installers write."""
_REACH_S = 5.0
"""Seconds in which a fork reaches the agent."""


@dataclass(frozen=True)
class AtStart:
    """What an interpreter has before its program begins: environment, sys.path, folder, open descriptors."""

    environment: Mapping[str, str]
    path: Sequence[str]
    folder: str
    descriptors: frozenset[str]


class Forked(BaseException):
    """This process is a fork, and leaves the launcher's frames."""


def reason_not_to_fork(start: AtStart, command: Sequence[str], frame: FrameType | None) -> str:
    """Why this launcher, which was started as torchrun, must not be forked into what runs `command`; empty: it may.
    `frame`: of the launch."""
    flags = [word for word in command[1:3] if word == "-u"]
    target = command[1 + len(flags) :][:1]
    if list(command[:1]) != [sys.executable] or not target or (target[0][:1] == "-" and target[0] not in ("-m", "-c")):
        return "ranks have another interpreter, or flags of their own"
    if not _is_as_shipped():
        return "it is not torchrun as torch ships it"
    while frame is not None:
        if frame.f_globals.get("__name__") not in _OF_TORCHRUN:
            return f"{frame.f_globals.get('__name__')} has called torchrun"
        frame = frame.f_back
    if "usercustomize" in sys.modules:
        return "a usercustomize may have changed it"
    if threading.current_thread() is not threading.main_thread() or len(os.listdir("/proc/self/task")) > 1:
        return "it has threads"
    if os.getcwd() != start.folder:
        return "it has changed its folder"
    opened = [name for name in os.listdir("/proc/self/fd") if name not in start.descriptors and _target(name)]
    if left := [name for name in opened if not _is_of_libffi(name)]:
        return f"it has opened {_target(left[0])}"
    return ""


def _is_as_shipped() -> bool:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name == TORCHRUN)
    names = {name for name in vars(main) if not name.startswith("__")}
    return names <= _OF_PROGRAM and getattr(main.__dict__.get("main"), "__module__", "") == TORCHRUN


def fork(
    count: int, address: str, environment: Mapping[str, str], start: AtStart, leave: Callable[[], None]
) -> list[int]:
    """Fork this launcher `count` times. Returns the pids of the forks that have reached the agent.

    Args:
        address: of the agent's socket for them.
        environment: what they have from now on.
        leave: takes back what a rank must not see of the launcher's modules.

    Raises:
        Forked: in each fork.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    reached = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        with ours, suppress(OSError):  # then there is one fewer
            with theirs:
                child = os.fork()
                if child == 0:
                    _in_child(ours, theirs, address, environment, start, leave)
            os.waitpid(child, 0)
            ours.settimeout(_REACH_S)
            ours.sendall(b".")  # from now on the fork has another parent
            if pid := ours.recv(16):
                reached.append(int(pid))
    return reached


def _in_child(ours: socket.socket, theirs: socket.socket, address: str, *more: Any) -> None:
    """Become a child of the nearest subreaper, which is the agent, reach it, and leave the launcher's frames."""
    try:
        ours.close()
        if os.fork():
            os._exit(0)
        os.setsid()
        theirs.recv(1)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_REACH_S)
        link.connect(address)
        link.settimeout(None)
        if struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
            os._exit(1)
        theirs.sendall(str(os.getpid()).encode())
        theirs.close()
        sys.excepthook = partial(_become_zygote, sys.excepthook, link.detach(), *more)
    except BaseException:  # noqa: BLE001 - a second launcher must never run
        os._exit(1)
    raise Forked


def _become_zygote(
    hook: Any,
    link: int,
    environment: Mapping[str, str],
    start: AtStart,
    leave: Callable[[], None],
    _: type,
    error: BaseException,
    frames: Any,
) -> None:
    """On an empty stack. Never returns."""
    sys.excepthook = hook
    traceback.clear_frames(frames)
    error.__traceback__ = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    leave()
    faulthandler.disable()  # torchrun enables it
    if sys.flags.dev_mode or os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _keep_only(link)
    _open_streams()
    from muster.daemon.agent.ranks import rank_main, zygote

    sys.path[:] = start.path
    rank_main.replace_environment(environment)
    zygote.main([str(link), str(os.getppid())])
    raise SystemExit(0)


def _keep_only(link: int) -> None:
    """Close all other descriptors but the first three, as for a new process."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != link and not _is_of_libffi(name) and _target(name):
            os.close(int(name))


def _is_of_libffi(name: str) -> bool:
    """Whether libffi has opened this descriptor of its own library. It makes callbacks of ctypes from it."""
    return "libffi" in _target(name)


def _target(name: str) -> str:
    """What a descriptor of this process is; empty: that of the listing itself, which is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def _open_streams() -> None:
    """Input is empty, and output is not buffered: as `python -u` opens them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        if number == 0 or not _is_open(number):
            os.dup2(nothing, number)
    os.close(nothing)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old: Any = getattr(sys, f"__{name}__")
        said = {"encoding": old.encoding, "errors": old.errors} if old is not None else {}
        raw: Any = open(number, "wb" if number else "rb", 0 if number else -1, closefd=False)  # noqa: SIM115
        stream: Any = io.TextIOWrapper(raw, newline="\n" if number else None, write_through=True, **said)
        stream.mode = "w" if number else "r"
        getattr(raw, "raw", raw).name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
