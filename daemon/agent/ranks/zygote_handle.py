"""The agent's side of one zygote: start it, give it work, receive its messages.

Only this module of the agent starts processes of the gang. Every one that runs on this node is a child of a
zygote.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import muster
from muster.daemon.agent.ranks.python_command import parse_python_command
from muster.daemon.agent.ranks.zygote import COMMAND, EXIT_TOO_OLD
from muster.daemon.agent.start_checks.job_paths import find_program
from muster.daemon.host import packets, process_tree

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 2.0

# Run folder, gang, generation, rank: together they name the log (muster.daemon.host.rank_log_files).
RankLog = tuple[str, str, int, int]

# All of the library: an upgrade may replace its files under a running job, and a rank must not mix two versions.
_LIBRARY = ("muster.checkpoint.training.loop", "muster.checkpoint.data.sharded_sampler")
# Modules that a first DistributedDataParallel step imports late, above all torch._dynamo (0.7 s), and torch itself.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    *_LIBRARY,
)


def modules_to_import(named: Sequence[str]) -> tuple[str, ...]:
    """What zygotes import: what job.toml names in `preload`, or PRELOAD. The library imports torch, so it comes along
    where torch comes anyway."""
    if not named:
        return PRELOAD
    brings_torch = any(name.partition(".")[0] in ("torch", "muster") for name in named)
    return (*named, *_LIBRARY) if brings_torch else tuple(named)


class CannotStart(Exception):
    """The user's fault: the job's command or folder can't be used on this node."""


@dataclass(frozen=True, slots=True)
class StartedAs:
    """What the processes of a launcher have from it, and those of the agent don't.

    processors: those that they may use; empty: as the agent.
    limits: by the name after RLIMIT_, soft and hard.
    umask: -1: as the agent.
    """

    processors: frozenset[int] = frozenset()
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    umask: int = -1

    def give(self, pid: int) -> None:
        """Give processors and limits to a process that has just been started, as far as it may have them."""
        if self.processors:
            with suppress(OSError):
                os.sched_setaffinity(pid, self.processors)
        for name, limits in self.limits.items():
            with suppress(OSError, ValueError):
                resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}"), limits)


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """What a zygote is started with: the job's argv, the modules to import, the environment, the working folder.

    started_as: what it has of a launcher.
    cold: why ranks are started by exec, whatever the command is; empty: they are forked, if the command allows it.
    macro: what stands for LOCAL_RANK in argv; empty: nothing does.
    learns: whether it also imports what ranks are seen to import.
    processors: those of each local rank; none: as started_as says.
    """

    argv: tuple[str, ...]
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    work_dir: str
    started_as: StartedAs = field(default_factory=StartedAs)
    cold: str = ""
    macro: str = ""
    learns: bool = False
    processors: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def for_local_rank(self, number: int) -> ZygoteSpec:
        """The same for the zygote of one local rank."""
        own = self
        if number in self.processors:
            own = replace(own, started_as=replace(own.started_as, processors=self.processors[number]))
        return replace(own, argv=tuple(w.replace(self.macro, str(number)) for w in self.argv)) if self.macro else own

    def started_anew(self) -> ZygoteSpec:
        """The same for an interpreter that is too old for a zygote."""
        return replace(self, preload=(), cold="its Python is older than 3.9")

    def without_preload(self) -> ZygoteSpec:
        """The same without early imports."""
        return replace(self, preload=(), learns=False)


class ForkedProcess:
    """A child of this process that another one has forked, as far as it is used like one of subprocess.

    link: the other end of its socket. environment: its own.
    """

    def __init__(self, pid: int, link: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid, self.link, self.environment = pid, link, environment
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, packets.MAX_BYTES)
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait until it has ended, and release its pid."""
        self.returncode = process_tree.exit_status(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        if self.returncode is None:
            process_tree.kill(self.pid, group=False)


class ZygoteHandle:
    """One zygote. `heard` is called with each of its messages, `ended` once after it has ended and was reaped."""

    def __init__(self, heard: Callable[[packets.Message], None], ended: Callable[[], None]) -> None:
        self._on_message = heard
        self._on_exit = ended
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._sock: socket.socket | None = None
        self._environment: Mapping[str, str] = {}
        self._cold = ""
        self._wait_task: asyncio.Task[None] | None = None
        self.ready = False
        self.has_torch = False
        self.has_libuv = True

    @property
    def pid(self) -> int:
        """The zygote's process; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_too_old(self) -> bool:
        """Whether it has ended because its interpreter is too old for it."""
        return self._process is not None and self._process.returncode == EXIT_TOO_OLD

    def start(self, spec: ZygoteSpec, fork: ForkedProcess | None = None) -> None:
        """Start the zygote, or have `fork` become it. It accepts work at once and carries it out after its imports.

        Raises:
            CannotStart: no interpreter, or no working folder.
        """
        if fork is None:
            ours, theirs = packets.pair()
            try:
                with theirs:
                    self._process = _spawn(spec, theirs)
            except CannotStart:
                ours.close()
                raise
        else:
            self._process, ours = fork, fork.link
        spec.started_as.give(self._process.pid)
        ours.setblocking(False)
        self._environment, self._cold = spec.environment, spec.cold
        self._sock = ours
        changed, unset = _difference(fork.environment if fork is not None else spec.environment, spec.environment)
        start = {"argv": spec.argv, "preload": spec.preload, "learns": spec.learns, "env": changed, "unset": unset}
        self._send(start, None if fork is None else [1, 2])
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)

    def run_rank(self, key: str, environment: Mapping[str, str], log: RankLog, link: int, *, cold: str = "") -> None:
        """Fork into a rank. `link`: the rank's socket; a copy is passed. `cold`: why the rank must be started by exec;
        empty: as the spec says."""
        changed, unset = _difference(self._environment, environment)
        self._send(
            {"do": "rank", "key": key, "env": changed, "unset": unset, "log": log, "cold": cold or self._cold},
            [link],
        )

    def open_store(self, key: str, avoid: Sequence[int]) -> None:
        """Fork into a rendezvous store on a port that is not in `avoid`."""
        self._send({"do": "store", "key": key, "avoid": list(avoid), "libuv": self.has_libuv})

    def learn(self, words: Sequence[str]) -> None:
        """Import what ranks were seen to import (imports/seen_imports), as far as that does no harm."""
        self._send({"do": "learn", "words": list(words)})

    def reap(self, key: str) -> None:
        """Release the pid of a child that has ended."""
        self._send({"do": "reap", "key": key})

    async def stop(self) -> None:
        """Ask the zygote to end its children and itself; kill it after 2 s. Wait 2 s more at most: a process that is
        blocked in the kernel ends later."""
        self._close()
        if self._wait_task is not None:
            done, _ = await asyncio.wait([self._wait_task], timeout=_STOP_TIMEOUT_S)
            if not done:
                self.kill()
                await asyncio.wait([self._wait_task], timeout=_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL the zygote; its children die with it."""
        if self._process is not None:
            self._process.kill()

    def _send(self, message: packets.Message, fds: list[int] | None = None) -> None:
        if self._sock is None:
            return
        try:
            packets.send(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the zygote has ended: `ended` will be called

    def _read(self) -> None:
        while self._sock is not None:
            try:
                received = packets.receive(self._sock)
            except BlockingIOError:
                return
            if received is None:
                self._close()
                return
            self._handle(received[0])

    def _handle(self, message: packets.Message) -> None:
        if message["say"] == "ready":
            self.ready, self.has_torch, self.has_libuv = (
                True,
                message["torch"],
                message["libuv"] or not message["torch"],
            )
        self._on_message(message)

    def _close(self) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self.ready = False
        self._wait_task = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._on_exit()


def interpreter_of(spec: ZygoteSpec) -> list[str]:
    """The interpreter and the flags of the job's command. If no rank is forked: the agent's own interpreter, in which
    nothing of the user's counts.

    Raises:
        CannotStart: no such interpreter.
    """
    command = None if spec.cold else parse_python_command(spec.argv, sys.executable)
    return [sys.executable, "-I"] if command is None else [_interpreter(command.interpreter, spec), *command.flags]


def _spawn(spec: ZygoteSpec, theirs: socket.socket) -> subprocess.Popen[bytes]:
    interpreter = interpreter_of(spec)
    root = str(Path(next(iter(muster.__path__))).parent)
    argv = [*interpreter, "-c", COMMAND, root, str(theirs.fileno()), str(os.getpid())]
    try:
        process = subprocess.Popen(
            argv,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=spec.work_dir or None,
            env=dict(spec.environment),
            start_new_session=True,
            umask=spec.started_as.umask,
        )
    except OSError as error:
        what = f"the working folder {spec.work_dir!r}" if error.filename == spec.work_dir else interpreter[0]
        raise CannotStart(f"{what} can't be used on this node: {error.strerror}") from None
    return process


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What `new` has otherwise than `old`, and what it lacks."""
    return {n: v for n, v in new.items() if old.get(n) != v}, [name for name in old if name not in new]


def _interpreter(word: str, spec: ZygoteSpec) -> str:
    path = spec.environment.get("PATH", os.defpath)
    found = find_program(_resolve(word, spec.work_dir), path, spec.work_dir)
    if found is None:
        raise CannotStart(f"no {word!r} on this node: give the interpreter's path, or check PATH in [env]")
    return found


def _resolve(word: str, work_dir: str) -> str:
    """A relative path with a folder in it starts at the working folder."""
    return os.path.join(work_dir, word) if "/" in word else word


def describe(message: Mapping[str, Any]) -> str:
    """A zygote's `ready` message in words, for the log."""
    torch = ("torch" + ("" if message["libuv"] else " without libuv")) if message["torch"] else "no torch"
    return f"zygote ready in {message['seconds']:.2f} s, {torch}"
