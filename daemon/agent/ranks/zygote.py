"""The zygote: imports what a rank will need, waits, and forks into the rank when a generation starts.

The agent starts one zygote per local rank through `COMMAND` below, with a Unix socket (see `packets`) as descriptor FD.
A zygote runs no tensor operation, so that it can be forked for every generation. It checks that before each fork; if
the check fails, the rank is started by exec. Commands that are not Python are always started by exec.

The zygote is the parent of its rank. It tells the agent how the rank ended, kills what the rank left behind, and dies
with the agent; the rank dies with the zygote. Uses the standard library only, because it runs in the user's
interpreter.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.daemon.agent.ranks import rank_main, rendezvous_store
from muster.daemon.agent.ranks.imports import fork_safety, trial
from muster.daemon.agent.ranks.imports.import_lessons import ImportLessons
from muster.daemon.agent.ranks.imports.preloading import Preloaded, preload
from muster.daemon.agent.ranks.imports.seen_imports import SeenImports
from muster.daemon.agent.ranks.python_command import PythonCommand, parse_python_command
from muster.daemon.host import packets, process_tree, rank_log_files
from muster.daemon.host.process import step_signals

_END_TIMEOUT_S = 5.0

# `python FLAGS -c COMMAND ROOT FD PARENT`. ROOT holds the package `muster`, because the user's interpreter may not have
# it. Only `muster` comes from ROOT: no other package of the agent's environment may come before, or beside, the user's
# packages. If the interpreter has `muster`, it may be another version: what is called here takes the same arguments in
# all of them. Importing it changes the environment for Muster's own gRPC, which is taken back.
COMMAND = """\
import os, sys
if sys.version_info < (3, 9):
    sys.exit(83)
path, environ = list(sys.path), dict(os.environ)
sys.path.append(sys.argv[1])
from muster.daemon.agent.ranks import rank_main, zygote
sys.path[:] = path[0 if getattr(sys.flags, "safe_path", sys.flags.isolated) else 1:]
rank_main.replace_environment(environ)
zygote.main(sys.argv[2:])
"""

EXIT_TOO_OLD = 83
"""This interpreter is older than the language of this module."""

ChildTask = Callable[[], None]


@dataclass
class _Child:
    pid: int
    # For a rank: run folder, gang, generation, rank.
    log: tuple[str, str, int, int] | None = None
    ended: bool = False
    gone: bool = False
    reaped: bool = False


class ZygoteServer:
    """The zygote's loop. In a forked child `serve` returns the child's task; in the zygote itself it returns None at
    the end."""

    def __init__(
        self,
        sock: socket.socket,
        argv: Sequence[str],
        command: PythonCommand | None,
        environment: Mapping[str, str],
        *,
        learns: bool = False,
    ) -> None:
        self._sock = sock
        self._lessons = ImportLessons(self._send) if learns and command is not None else None
        self._environment = environment
        self._argv = argv
        self._command = command
        self._children: dict[str, _Child] = {}
        self._pid, self._agent = os.getpid(), os.getppid()
        self._wake_reader, self._wake_writer = _wake_on_child()

    def serve(self) -> ChildTask | None:
        """Process the agent's messages until the agent has ended."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        while True:
            period = self._lessons.period if self._lessons else None
            ready = {fd for fd, _ in poll.poll(None if period is None else 1000 * period)}
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
                self._check_children()
            if self._sock.fileno() in ready:
                received = packets.receive(self._sock)
                if received is None:
                    self._end_children()
                    return None
                if (task := self._handle(*received)) is not None:
                    return task
            if (task := self._go_on_learning()) is not None:
                return task

    def _handle(self, message: packets.Message, fds: list[int]) -> ChildTask | None:
        what = message["do"]
        if what == "rank":
            return self._start_rank(message, fds)
        if what == "store":
            return self._start_store(message)
        if what == "reap":
            self._reap(message["key"])
        elif what == "learn" and self._lessons is not None:
            self._lessons.learn(message["words"])
        elif what != "learn":
            raise ValueError(f"the agent sent {what!r}, which this version does not know")
        return None

    # --- children ----------------------------------------------------------------------------------------------------

    def _start_rank(self, message: packets.Message, fds: list[int]) -> ChildTask | None:
        why = message["cold"] or self._reason_not_to_fork()
        seen = self._lessons.watch_rank() if self._lessons is not None and not why else None
        pid = os.fork()
        if pid == 0:
            return lambda: self._become_rank(message, fds[0], seen, cold=bool(why))
        os.close(fds[0])
        self._children[message["key"]] = _Child(pid, log=tuple(message["log"]))
        self._send("started", message["key"], pid=pid, cold=why)
        return None

    def _reason_not_to_fork(self) -> str:
        return "the command is not a Python script" if self._command is None else fork_safety.reason_not_to_fork()

    def _become_rank(self, message: packets.Message, link: int, seen: SeenImports | None, *, cold: bool) -> None:
        environment = _changed(self._environment, message)
        rank_main.detach(self._pid)
        process_tree.allow_tracers_below(self._agent)
        # Open the log here, not in the agent: shared storage may block, and then blocks only this rank.
        log: int | None
        try:
            log = rank_log_files.open_log(*message["log"])
        except OSError as error:
            # Before the first step nothing is lost. Later a rank without a log is worth more than a job that ends.
            first = message["log"][2] == 1
            if first or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._send("refused", message["key"], words=str(error.strerror))
                os._exit(1)
            self._send("unlogged", message["key"], words=str(error.strerror))
            log = None
        rank_main.redirect_output(log)
        self._close()
        rank_main.replace_environment({**environment, "MUSTER_AGENT_FD": str(link)})
        if cold or self._command is None:
            os.set_inheritable(link, True)
            rank_main.exec_command(self._argv)
        process_tree.set_process_name(f"rank{environment.get('RANK', '')}")
        gc.enable()
        if seen is not None:
            seen.record(self._environment)
        rank_main.run_as_main(self._command)

    def _start_store(self, message: packets.Message) -> ChildTask | None:
        pid = os.fork()
        if pid == 0:
            return lambda: self._become_store(message)
        self._children[message["key"]] = _Child(pid)
        self._send("started", message["key"], pid=pid, cold="")
        return None

    def _become_store(self, message: packets.Message) -> None:
        rank_main.detach(self._pid)
        _ignore_signals()
        process_tree.set_process_name("muster-store")
        rendezvous_store.serve(
            message["avoid"], message["libuv"], lambda port: self._send("store", message["key"], port=port)
        )

    def _go_on_learning(self) -> ChildTask | None:
        lessons = self._lessons
        if lessons is None or not lessons.turn():
            return None
        pid = os.fork()
        if pid == 0:
            return lambda: self._become_trial(lessons.name, lessons.variables)
        lessons.trying(pid)
        return None

    def _become_trial(self, name: str, variables: set[str]) -> None:
        rank_main.detach(self._pid)
        process_tree.set_process_name("muster-trial")
        rank_main.redirect_output(None)
        if why := trial.reason_against(name, variables):
            self._send("left", "", name=name, why=why)
        os._exit(bool(why))

    def _check_children(self) -> None:
        if self._lessons is not None:
            self._lessons.check_trial()
        for key, child in self._children.items():
            if not child.ended and (code := _exit_code(child.pid)) is not None:
                child.ended = True
                # A process that got SIGKILL has written no error, and a fence must not wait for shared storage.
                words = child.log is not None and code not in (0, -signal.SIGKILL)
                tail = ""
                if words and child.log:
                    tail = rank_log_files.log_tail(*child.log)
                    rank_log_files.note_failed(*child.log, code)
                self._send("exit", key, code=code, tail=tail)
        self._kill_leftovers()

    def _kill_leftovers(self) -> None:
        waiting = [key for key, child in self._children.items() if child.ended and not child.gone]
        # Only a rank leaves processes behind, and this zygote has one rank at a time.
        if any(self._children[key].log is not None for key in waiting):
            keep = {child.pid for child in self._children.values() if not child.reaped}
            keep |= self._lessons.pids if self._lessons else set()
            if process_tree.kill_orphans(keep) > 0:
                return
        for key in waiting:
            self._children[key].gone = True
            self._send("gone", key)

    def _reap(self, key: str) -> None:
        child = self._children.pop(key)
        os.waitpid(child.pid, 0)

    def _end_children(self) -> None:
        """The agent has ended: end all children. The parent-death signal kills those that are left."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        while process_tree.kill_orphans(set()) > 0 and time.monotonic() < deadline:
            select.select([self._wake_reader], [], [], 0.1)

    def _send(self, word: str, key: str, **more: Any) -> None:
        try:
            packets.send(self._sock, {"say": word, "key": key, **more})
        except BrokenPipeError:
            pass  # the agent has ended; the next read of the socket shows it

    def _close(self) -> None:
        self._sock.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def main(arguments: Sequence[str]) -> None:
    """Entry point. Arguments: FD of the socket, PARENT's pid. The ranks get the environment of this moment."""
    fd, parent = int(arguments[0]), int(arguments[1])
    process_tree.die_with_parent(parent)
    process_tree.adopt_orphans()
    process_tree.set_process_name("muster-warm")
    _ignore_signals()
    environment: Mapping[str, str] = dict(os.environ)  # an import may change it
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    received = packets.receive(sock)
    if received is None:
        os._exit(0)
    gc.disable()  # collection during imports finds nothing and takes a tenth of their time
    start, streams = received
    rank_main.replace_environment(environment := _changed(environment, start))
    for number, descriptor in enumerate(streams, 1):  # those of a launcher may be a pipe whose reader waits for its end
        os.dup2(descriptor, number)
        os.close(descriptor)
    server = ZygoteServer(sock, start["argv"], _prepare(sock, start), environment, learns=start["learns"])
    gc.freeze()  # children share these pages and never scan them
    if (task := server.serve()) is None:
        os._exit(0)  # the interpreter's cleanup takes a second with torch and is useless here
    task()


def _changed(environment: Mapping[str, str], message: packets.Message) -> dict[str, str]:
    # An agent that runs on beside newer files sends neither.
    changed = {**environment, **message.get("env", {})}
    return {name: value for name, value in changed.items() if name not in message.get("unset", ())}


def _ignore_signals() -> None:
    """Slurm signals every process of a step. No signal is meant for the zygote, or for a store."""
    step_signals.ignore()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _prepare(sock: socket.socket, message: packets.Message) -> PythonCommand | None:
    started = time.monotonic()
    command = parse_python_command(message["argv"], sys.executable)
    found = Preloaded([])
    if command is not None:
        rank_main.set_argv_and_path(command, message["argv"])
        has_library = not rank_main.is_too_old_for_library()
        found = preload([name for name in message["preload"] if has_library or not name.startswith("muster.")])
    torch = "torch.distributed" in sys.modules
    libuv = torch and rendezvous_store.has_libuv()
    ready = {"torch": torch, "libuv": libuv, "notes": found.notes, "broken": found.broken}
    try:
        packets.send(sock, {"say": "ready", "key": "", "seconds": time.monotonic() - started, **ready})
    except BrokenPipeError:
        pass  # the agent has ended; the first read of the socket shows it
    return command


def _wake_on_child() -> tuple[int, int]:
    """A pipe that becomes readable when a child has ended."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader, writer


def _exit_code(pid: int) -> int | None:
    """How a child ended (0 to 255, or minus the signal), leaving it as a zombie; None while it runs."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
