"""What the ranks of a generation that hangs were doing: their Python stacks, and what the kernel says of their threads,
in a file beside each rank's log.

A fence waits for it, but never long: it is done in a thread, which a shared storage that hangs holds up alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format import stack_file
from muster.daemon.host import process_tree, rank_log_files
from muster.daemon.host.worker_threads import WorkerThreads

log = logging.getLogger(__name__)

MAX_STACK_BYTES = 1 << 18
"""Of one rank's stacks."""
_MOST_THREADS = 128
_MOST_PROCESSES = 32
_ANSWER_S = 1.0
"""A process that gets a processor has written its stacks by then; one that is stopped never does."""
_LOOK_AGAIN_S = 0.02


@dataclass(slots=True)
class _Asked:
    """A process that was told to write its stacks into `file`, which had `before` bytes then."""

    file: str
    before: int
    size: int = -1
    settled: bool = False

    def look(self) -> bool:
        """Whether it has written all of them: they are there, and no more have come since the last look."""
        with suppress(OSError):
            size = os.stat(self.file).st_size
            self.settled, self.size = self.before < size == self.size, size
        return self.settled

    def text(self) -> str:
        """What it has written."""
        try:
            with open(self.file, "rb") as file:
                file.seek(self.before)
                return file.read(MAX_STACK_BYTES).decode(errors="replace")
        except OSError as error:
            return f"its stacks can't be read: {error.strerror}\n"


def write_stacks(files: Mapping[Path, int]) -> None:
    """Write the stacks of each process (by pid) and of what it has started to its file. Blocking."""
    asked = {path: _ask(pid) for path, pid in files.items()}
    until = time.monotonic() + _ANSWER_S
    while not all([one is None or one.look() for one in asked.values()]) and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN_S)
    for path, pid in files.items():
        path.write_text("".join([*_words(pid), _stacks(asked[path])]))


def _ask(pid: int) -> _Asked | None:
    """Signal the first of a process and its descendants that has a stack file."""
    for member in _tree(pid):
        if (file := stack_file.find_stack_file(member)) is not None:
            with suppress(OSError):
                asked = _Asked(file, os.stat(file).st_size)
                process_tree.send_signal(member, stack_file.STACK_SIGNAL)
                return asked
    return None


def _stacks(asked: _Asked | None) -> str:
    if asked is None:
        return "\nno Python stacks: it is not Python, or has not begun to use Muster's library\n"
    if not asked.settled and asked.size <= asked.before:
        return f"\nno Python stacks within {_ANSWER_S:g} s: see the states of its threads\n"
    return f"\n{asked.text()}"


def _words(pid: int) -> Iterator[str]:
    """A line for each thread of a process and its descendants: what the kernel says of it."""
    for member in _tree(pid):
        with suppress(OSError):
            yield f"process {member} ({_read(member, 'comm')})\n"
            for thread in sorted(map(int, os.listdir(f"/proc/{member}/task")))[:_MOST_THREADS]:
                yield f"  thread {thread}: {_thread(f'{member}/task/{thread}')}\n"


def _thread(thread: str) -> str:
    state = next((line for line in _read(thread, "status").splitlines() if line.startswith("State:")), "State: gone")
    words = [state.removeprefix("State:").strip()]
    if (where := _read(thread, "wchan")) not in ("", "0"):
        words.append(f"waits in {where}")
    if (call := _read(thread, "syscall").partition(" ")[0]).isdigit():
        words.append(f"system call {call}")
    return ", ".join(words)


def _read(what: object, name: str) -> str:
    """A file of /proc; empty where it can't be read."""
    try:
        return Path(f"/proc/{what}/{name}").read_text().strip()
    except OSError:
        return ""


def _tree(pid: int) -> list[int]:
    """A process and its descendants, the nearest first."""
    found = [pid]
    for member in found:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{member}/task"):
                found += map(int, _read(f"{member}/task/{thread}", "children").split())
        if len(found) >= _MOST_PROCESSES:
            break
    return found[:_MOST_PROCESSES]


class StackDumps:
    """Keeps the stacks of this node's ranks in the folder of the gang's logs, once for each generation.

    generation: the newest for which that is over.
    """

    def __init__(self, run_dir: str, gang: str) -> None:
        self._run_dir = run_dir
        self._gang = gang
        self._work = WorkerThreads(1)
        self._begun = 0
        self.generation = 0

    def claim(self, generation: int) -> bool:
        """Whether the stacks of `generation` are still to be kept; from now on they are not."""
        fresh, self._begun = generation > self._begun, max(generation, self._begun)
        return fresh

    async def write(self, generation: int, pids: Mapping[int, int]) -> None:
        """Keep those of the ranks with these pids, by rank. What can't be written is said in the log."""
        files = {
            rank_log_files.stacks_path(self._run_dir, self._gang, generation, rank): pid for rank, pid in pids.items()
        }
        try:
            await self._work(write_stacks, files)
        except OSError as error:
            log.error("the stacks of generation %d can't be written: %s", generation, error)
        self.generation = max(generation, self.generation)

    def close(self) -> None:
        """Keep no more."""
        self._work.close()
