"""The task of `muster-agent run -- WORDS`: the user's own command on this node, before and after its hand-over.

The command is a launcher, or a shell that starts one. It runs as srun would run it, with one folder more in PYTHONPATH
(`user_path`). Its launcher says over a socket what it would start, and waits. When the gang has ended, it gets the exit
code, and the command goes on as if its launcher had ended. A command may end without a launcher; then its exit code is
all that there is.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster import exit_codes
from muster.daemon.agent.launch import handover
from muster.daemon.agent.launch.handover import Handover, WrongHandover
from muster.daemon.agent.launch.user_path.sitecustomize import FORKS, SOCKET
from muster.daemon.agent.ranks.zygote_handle import ForkedProcess
from muster.daemon.host import process_tree
from muster.daemon.host.process import step_signals

USER_PATH = str(Path(__file__).parent / "user_path")
_MOST_BYTES = 64 << 20
"""Of a hand-over: it holds an environment."""
_TERM_S = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_LOOK_S = 2.0
_WHY_STRAY = "Its PYTHONPATH or -I keeps Muster out: write export PYTHONPATH=/folder:$PYTHONPATH"
_CANNOT_START = 127
_AFTER_THE_END = "one launch of an srun is supervised, and this one is another: write an srun for each"


class Task:
    """The user's command, from `start` to its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], listener: socket.socket, forks: socket.socket, name: str
    ) -> None:
        self._process = process
        self._forks = forks
        self._name = name
        self._listener = listener
        self._handed_over: asyncio.Future[Handover] = asyncio.get_running_loop().create_future()
        self._exit_code: asyncio.Task[int] = asyncio.ensure_future(asyncio.to_thread(self._wait))
        self._waiting: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self.terminated = False

    @staticmethod
    def start(words: Sequence[str], environment: Mapping[str, str]) -> Task | int:
        """Start the command; the exit code if that fails. Call it while this process has one thread."""
        name = f"muster-task-{secrets.token_hex(16)}"
        listener, forks = _listen(socket.SOCK_STREAM, name), _listen(socket.SOCK_SEQPACKET, name + FORKS)
        try:
            process = subprocess.Popen(
                words, env=task_environment(environment, name), stdin=subprocess.DEVNULL, preexec_fn=_as_srun_starts
            )
        except OSError as error:
            print(f"muster-agent: can't run {words[0]!r}: {error.strerror}", file=sys.stderr)
            listener.close()
            forks.close()
            return _CANNOT_START
        return Task(process, listener, forks, name)

    @property
    def pid(self) -> int:
        """The process of the command."""
        return self._process.pid

    async def handed_over(self) -> Handover | int:
        """What the launcher hands over; the exit code of a command that ends before."""
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener, limit=_MOST_BYTES)
        looking = asyncio.ensure_future(self._look_for_strays())
        try:
            return await self._first()
        finally:
            looking.cancel()

    async def _first(self) -> Handover | int:
        first: set[asyncio.Future[Any]] = {self._handed_over, self._exit_code}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return self._handed_over.result() if self._handed_over.done() else self._exit_code.result()

    async def _look_for_strays(self) -> None:
        """Say it once if a launcher of this command has started ranks by itself."""
        marks = (f"{SOCKET}={self._name}", "TORCHELASTIC_RUN_ID=")
        while not await asyncio.to_thread(process_tree.any_with_environment, *marks):  # noqa: ASYNC110 - strangers
            await asyncio.sleep(_LOOK_S)
        print(f"muster: not supervised: a launcher has started its ranks itself. {_WHY_STRAY}", file=sys.stderr)

    def forks(self, found: Handover, environment: Mapping[str, str]) -> tuple[ForkedProcess, ...]:
        """The forks of the launcher that may run ranks with this environment. Others end."""
        links = []
        with self._forks, suppress(BlockingIOError):
            while True:
                links.append(self._forks.accept()[0])
        known = found.forks & set(process_tree.child_pids()) if found.imports_as(environment) else set()
        forked = []
        for link in links:
            pid, uid = _peer(link)
            if uid == os.getuid() and pid in known:
                forked.append(ForkedProcess(pid, link, found.environment))
            else:
                link.close()
        return tuple(forked)

    async def refuse(self, words: str) -> int:
        """Tell the launcher that the gang can't run this; the exit code of the command."""
        await self._answer({"refused": words})
        return await self._end()

    async def finish(self, exit_code: int) -> None:
        """Tell the launcher how the gang has ended, unless the command is to end. Return when it has ended."""
        if not self.terminated:
            await self._answer({"exit_code": exit_codes.of_launcher(exit_code)})
        await self._end()

    def terminate(self) -> None:
        """End the command: SIGTERM, and SIGKILL if it goes on."""
        if not self.terminated:
            self.terminated = True
            self._signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(_TERM_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the process group that the command leads."""
        if self._process.returncode is None:
            if number is signal.SIGKILL:
                process_tree.kill(self.pid)
            else:
                os.killpg(self.pid, number)

    async def _end(self) -> int:
        code = await self._exit_code
        if self._server is not None:
            self._server.close()
        return code

    def _wait(self) -> int:
        return exit_codes.of_shell(self._process.wait())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer(writer.get_extra_info("socket"))[1] != os.getuid():
                return
            line = await reader.readline()
            if self._handed_over.done():
                await _write(writer, {"refused": _AFTER_THE_END})
                return
            try:
                found = handover.read(line)
            except WrongHandover as error:
                await _write(writer, {"refused": str(error)})
                return
            self._waiting = writer
            self._handed_over.set_result(found)
            await reader.read()  # until the launcher has ended
        finally:
            writer.close()

    async def _answer(self, answer: Mapping[str, object]) -> None:
        if self._waiting is not None:
            await _write(self._waiting, answer)


def task_environment(environment: Mapping[str, str], socket_name: str) -> dict[str, str]:
    """The environment with which the command finds the way back."""
    path = filter(None, (USER_PATH, environment.get("PYTHONPATH", "")))
    return {**environment, "PYTHONPATH": os.pathsep.join(path), SOCKET: socket_name}


def _as_srun_starts() -> None:
    """As srun starts a task: it leads a process group, and no signal is ignored."""
    os.setpgid(0, 0)
    for number in (*step_signals.FOR_RANKS, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _listen(kind: socket.SocketKind, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(f"\0{name}")
    listener.listen()
    listener.setblocking(False)
    return listener


def _peer(link: socket.socket) -> tuple[int, int]:
    """The process at the other end, as this one sees it, and its user."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


async def _write(writer: asyncio.StreamWriter, answer: Mapping[str, object]) -> None:
    try:
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher has ended
