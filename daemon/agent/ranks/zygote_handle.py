"""The agent's end of one warm process: start it, hand it work, hear from it.

The door to subprocess of the agent. Everything that runs on the node for the gang is a child of a warm process, so this
is also where ranks come from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import muster
from muster.daemon.agent.ranks.python_command import parse_python_command
from muster.daemon.agent.ranks.zygote import COMMAND
from muster.daemon.host import packets

log = logging.getLogger(__name__)

_STOP_S = 2.0

# Run folder, gang, generation, rank: names the log (muster.daemon.host.rank_log_files).
RankLog = tuple[str, str, int, int]

# What a first DistributedDataParallel step imports late, torch._dynamo above all (0.7 s), beside torch itself.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    "muster.checkpoint.training.loop",
)


class CannotStart(Exception):
    """The user's fault: the job's command or folder can't be used on this node."""


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """What a warm process is started with: the job's argv, the modules to import, environment, working folder."""

    argv: tuple[str, ...]
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    work_dir: str

    def without_preload(self) -> ZygoteSpec:
        """The same without imports ahead of time."""
        return replace(self, preload=())


class ZygoteHandle:
    """One warm process. `heard` is called with each of its messages, `ended` once when it has ended (and been
    reaped).
    """

    def __init__(self, heard: Callable[[packets.Message], None], ended: Callable[[], None]) -> None:
        self._heard = heard
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: asyncio.Task[None] | None = None
        self.ready = False
        self.has_torch = False
        self.has_libuv = True

    @property
    def pid(self) -> int:
        """Its process, 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self, recipe: ZygoteSpec) -> None:
        """Start the process; it can be given work at once, and carries it out when it is warm.

        Raises:
            CannotStart: no interpreter, or no working folder.
        """
        ours, theirs = packets.pair()
        try:
            with theirs:
                self._process = _spawn(recipe, theirs)
        except CannotStart:
            ours.close()
            raise
        ours.setblocking(False)
        self._sock = ours
        self._send({"argv": recipe.argv, "preload": recipe.preload})
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)

    def run_rank(self, key: str, environment: Mapping[str, str], log: RankLog, link: int, *, cold: str = "") -> None:
        """Fork into a rank. `link`: its socket, of which a copy is passed. `cold`: why it must be executed instead."""
        self._send({"do": "rank", "key": key, "env": dict(environment), "log": log, "cold": cold}, [link])

    def open_store(self, key: str, avoid: Sequence[int]) -> None:
        """Fork into a rendezvous store on a port that is not in `avoid`."""
        self._send({"do": "store", "key": key, "avoid": list(avoid), "libuv": self.has_libuv})

    def reap(self, key: str) -> None:
        """Release the pid of a child that has ended."""
        self._send({"do": "reap", "key": key})

    async def stop(self) -> None:
        """Let it go: it ends its children, then itself; killed where it does not within 2 s. Waited for 2 s more: one
        that sleeps in the kernel ends when that lets it."""
        self._close()
        if self._waiting is not None:
            done, _ = await asyncio.wait([self._waiting], timeout=_STOP_S)
            if not done:
                self.kill()
                await asyncio.wait([self._waiting], timeout=_STOP_S)

    def kill(self) -> None:
        """End it at once; its children die of that."""
        if self._process is not None:
            self._process.kill()

    def _send(self, message: packets.Message, fds: list[int] | None = None) -> None:
        if self._sock is None:
            return
        try:
            packets.send(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended: `ended` is on its way

    def _read(self) -> None:
        while self._sock is not None:
            try:
                received = packets.receive(self._sock)
            except BlockingIOError:
                return
            if received is None:
                self._close()
                return
            self._take(received[0])

    def _take(self, message: packets.Message) -> None:
        if message["say"] == "ready":
            self.ready, self.has_torch, self.has_libuv = (
                True,
                message["torch"],
                message["libuv"] or not message["torch"],
            )
        self._heard(message)

    def _close(self) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self.ready = False
        self._waiting = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._ended()


def _spawn(recipe: ZygoteSpec, theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = parse_python_command(recipe.argv, sys.executable)
    interpreter, flags = sys.executable, []
    if command is not None:
        interpreter, flags = _interpreter(command.interpreter, recipe), list(command.flags)
    root = str(Path(next(iter(muster.__path__))).parent)
    argv = [interpreter, *flags, "-c", COMMAND, root, str(theirs.fileno()), str(os.getpid())]
    try:
        return subprocess.Popen(
            argv,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=recipe.work_dir or None,
            env=dict(recipe.environment),
            start_new_session=True,
        )
    except OSError as error:
        what = f"the working folder {recipe.work_dir!r}" if error.filename == recipe.work_dir else interpreter
        raise CannotStart(f"{what} can't be used on this node: {error.strerror}") from None


def _interpreter(word: str, recipe: ZygoteSpec) -> str:
    path = recipe.environment.get("PATH")
    found = shutil.which(word if os.path.isabs(word) else _beside(word, recipe.work_dir), path=path)
    if found is None:
        raise CannotStart(f"no {word!r} on this node: give the interpreter's path, or check PATH in [env]")
    return found


def _beside(word: str, work_dir: str) -> str:
    """A relative path with a folder in it is meant from the working folder."""
    return str(Path(work_dir, word)) if "/" in word else word


def describe(message: Mapping[str, Any]) -> str:
    """A warm process's `ready`, in words for the log."""
    torch = ("torch" + ("" if message["libuv"] else " without libuv")) if message["torch"] else "no torch"
    return f"warm in {message['seconds']:.2f} s, {torch}"
