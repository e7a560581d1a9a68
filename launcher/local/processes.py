"""The door to processes for `muster run --local`: start them, end them with all that they started.

Each program leads a process group of its own and dies with this process (parent-death signal). Programs must be started
before this process has a second thread: code runs between fork and exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.daemon.host import process_tree

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Program:
    """One program that runs, its log in `log`."""

    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def ended(self) -> int | None:
        """Its exit status (negative: the signal), None while it runs."""
        return self.popen.poll()

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        try:
            return (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        except OSError:
            return ""


def start(name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> Program:
    """Starts `argv`; its output goes to `log`."""
    parent = os.getpid()
    with log.open("ab") as output:
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            preexec_fn=lambda: process_tree.die_with_parent(parent),
        )
    return Program(name, log, popen)


def kill(programs: Sequence[Program]) -> None:
    """SIGKILL these programs and every process below them, all before any of them could react."""
    below = _children()
    for program in programs:
        if program.ended is None:
            for pid in (program.popen.pid, *_tree(program.popen.pid, below)):
                process_tree.kill(pid)
    for program in programs:
        program.popen.wait()


def stop(programs: Sequence[Program], grace_s: float) -> None:
    """SIGTERM these programs, and SIGKILL what still runs after `grace_s` seconds."""
    for program in programs:
        if program.ended is None:
            process_tree.send_signal(program.popen.pid, signal.SIGTERM)
    wait(programs, grace_s)
    kill(programs)


def wait(programs: Sequence[Program], seconds: float) -> bool:
    """Until all of these have ended, `seconds` at most; whether they have. Blocking."""
    deadline = time.monotonic() + seconds
    while any(program.ended is None for program in programs):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def tell_rank(agent: Program, rank: int, signum: int) -> bool:
    """Send a signal to the process of `rank` below its agent; whether there was one."""
    for pid in _tree(agent.popen.pid, _children()):
        if _is_rank(pid, rank):
            process_tree.send_signal(pid, signum)
            return True
    return False


def _is_rank(pid: int, rank: int) -> bool:
    """A rank leads a session. One that was forked has its name, one that was executed its environment."""
    try:
        if os.getsid(pid) != pid:
            return False
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return Path(f"/proc/{pid}/comm").read_text().strip() == f"rank{rank}" or f"RANK={rank}".encode() in environment
    except (OSError, ProcessLookupError):
        return False


def _tree(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def _children() -> dict[int, list[int]]:
    """Every process of this host by its parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            # The command's name stands in parentheses and may hold anything; state and parent follow it.
            found.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    return found
