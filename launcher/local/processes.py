"""The only module of `muster run --local` that starts and ends processes.

Each program leads its own process group and dies with this process (parent-death signal). Start all programs before
this process has a second thread: Python code runs between fork and exec.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host import process_tree

_POLL_S = 0.02
"""Seconds between two checks whether programs have ended."""


@dataclass(frozen=True, slots=True)
class Program:
    """A running program. Its output goes to the file `log`, if the program does not share that of this process."""

    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def exit_status(self) -> int | None:
        """The exit status (negative: the signal that ended the program). None while it runs."""
        return self.popen.poll()

    @property
    def last_log_line(self) -> str:
        """The last line of the program's log."""
        try:
            return (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        except OSError:
            return ""


def start(
    name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str], *, shares_output: bool = False
) -> Program:
    """Starts `argv`. Its output goes to `log`, or to that of this process."""
    parent = os.getpid()
    with log.open("ab") as output:
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=None if shares_output else output,
            stderr=None if shares_output else subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            preexec_fn=lambda: process_tree.die_with_parent(parent),
        )
    return Program(name, log, popen)


def kill(programs: Sequence[Program]) -> None:
    """Sends SIGKILL to these programs and all their children, before any of them can react."""
    below = _children()
    for program in programs:
        if program.exit_status is None:
            for pid in (program.popen.pid, *_tree(program.popen.pid, below)):
                process_tree.kill(pid)
    for program in programs:
        program.popen.wait()


def stop(programs: Sequence[Program], grace_s: float) -> None:
    """Sends SIGTERM to these programs, and SIGKILL to those that still run after `grace_s` seconds."""
    for program in programs:
        if program.exit_status is None:
            process_tree.send_signal(program.popen.pid, signal.SIGTERM)
    wait(programs, grace_s)
    kill(programs)


def wait(programs: Sequence[Program], seconds: float) -> bool:
    """Waits until all programs have ended, at most `seconds`. Returns whether they have. Blocks."""
    deadline = time.monotonic() + seconds
    while any(program.exit_status is None for program in programs):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def signal_rank(agent: Program, rank: int, signum: int) -> bool:
    """Sends a signal to the process of `rank` below its agent. Returns False if there is no such process."""
    for pid in _tree(agent.popen.pid, _children()):
        if _rank_of(pid) == rank:
            process_tree.send_signal(pid, signum)
            return True
    return False


def interrupt_ranks(
    agents: Sequence[Program], number: signal.Signals, seconds: float, over: Callable[[], bool]
) -> None:
    """Sends a signal to all ranks below these agents. Those that handle it may go on for `seconds`, unless `over` says
    otherwise. Blocks."""
    below = _children()
    ranks = [pid for agent in agents for pid in _tree(agent.popen.pid, below) if _rank_of(pid) is not None]
    handle_it = [pid for pid in ranks if _handles(pid, number)]
    for pid in ranks:
        process_tree.send_signal(pid, number)
    deadline = time.monotonic() + seconds
    while any(_handles(pid, number) for pid in handle_it) and time.monotonic() < deadline and not over():
        time.sleep(_POLL_S)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process lives and has a handler of the signal."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _rank_of(pid: int) -> int | None:
    """The rank that a process is; None: it is none.

    A rank leads a session. A forked rank has the process name "rank" plus its number. An executed rank has RANK in its
    environment.
    """
    try:
        if os.getsid(pid) != pid:
            return None
        said = Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return None
    found = re.match(r"rank(\d+)\n|(?s:.*?)[\n\0]RANK=(\d+)\0", said)
    return int(found[1] or found[2]) if found else None


def _tree(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """The children of `pid` and their descendants."""
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def _children() -> dict[int, list[int]]:
    """All processes of this host, by the pid of their parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            # The command name is in parentheses and may contain any character. State and parent follow it.
            found.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    return found
