"""What the ranks of a hanging generation were doing, in a file beside each rank's log: the kernel's state of their
threads, their Python stacks, and their native stacks where py-spy is installed.

A fence waits for this, but never long. It runs in a thread, so that blocked shared storage blocks only that thread.

Native stacks have the C functions below Python. py-spy (github.com/benfred/py-spy) stops a process for the time in
which it reads its stacks. It reads them from outside, so a rank in which no Python runs has them, too, and it names the
thread that holds the GIL. The kernel lets a process read only its own user's processes. With kernel.yama.ptrace_scope 1
these must have allowed it, which ranks do (`process_tree.allow_tracers_below`); with 2 or 3 there are no native stacks.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format import stack_file
from muster.daemon.agent.ranks.hang_place import HangPlace, place_in
from muster.daemon.host import process_tree, rank_log_files
from muster.daemon.host.held_folder import HeldFolder
from muster.daemon.host.worker_threads import WorkerThreads

log = logging.getLogger(__name__)

MAX_STACK_BYTES = 1 << 18
"""Bytes of one rank's stacks, and as many of the native ones of a process."""
_MAX_THREADS = 128
_MAX_PROCESSES = 32
_DUMP_TIMEOUT_S = 1.0
"""Seconds in which a process that gets a processor has written its stacks. A stopped process never writes them."""
_NATIVE_TIMEOUT_S = 1.6
"""Seconds after which native stacks are given up. The coordinator fences the ranks 2 s after it has found the hang."""
_LEAST_NATIVE_WAIT_S = 0.01
_POLL_S = 0.02


@dataclass(slots=True)
class _PendingDump:
    """A process that was told to write its stacks into `file`, which then had `before` bytes."""

    pid: int
    file: str
    before: int
    size: int = -1
    settled: bool = False

    def poll(self) -> bool:
        """Return whether all stacks are written: some are there, and none were added since the last call."""
        with suppress(OSError):
            size = os.stat(self.file).st_size
            self.settled, self.size = self.before < size == self.size, size
        return self.settled

    def text(self) -> str:
        """What the process has written."""
        try:
            with open(self.file, "rb") as file:
                file.seek(self.before)
                return file.read(MAX_STACK_BYTES).decode(errors="replace")
        except OSError as error:
            return f"its stacks can't be read: {error.strerror}\n"


def write_stacks(folder: HeldFolder, files: Mapping[str, int], py_spy: str = "") -> dict[str, str]:
    """For each file of `folder`, write the stacks of the process (its pid is given) and of its descendants. Blocks.

    `py_spy`: the program that reads native stacks; empty: there are none. Returns the Python stacks in each file.
    """
    began = time.monotonic()
    pending = {name: _request_dump(pid) for name, pid in files.items()}
    until = began + _DUMP_TIMEOUT_S
    while not all([one is None or one.poll() for one in pending.values()]) and time.monotonic() < until:
        time.sleep(_POLL_S)
    texts = {name: _dump_text(one) for name, one in pending.items()}
    for name, pid in files.items():
        _write(folder.create(name), "".join([*_kernel_lines(pid), texts[name]]))
    if py_spy:
        _append_native_stacks(folder, py_spy, {name: one.pid for name, one in pending.items() if one}, began)
    return texts


def _append_native_stacks(folder: HeldFolder, py_spy: str, pids: Mapping[str, int], began: float) -> None:
    """Add the native stacks of these processes to the files. Python's come first: py-spy stops a process."""
    texts = native_stacks(py_spy, pids.values(), began + _NATIVE_TIMEOUT_S)
    for name, pid in pids.items():
        _write(folder.append(name), f"\nnative stacks:\n{texts[pid]}")


def _write(descriptor: int, text: str) -> None:
    with open(descriptor, "w") as file:
        file.write(text)


def _request_dump(pid: int) -> _PendingDump | None:
    """Signal the first process, of this one and its descendants, that has a stack file."""
    for member in _process_and_descendants(pid):
        if (file := stack_file.find_stack_file(member)) is not None:
            with suppress(OSError):
                pending = _PendingDump(member, file, os.stat(file).st_size)
                process_tree.send_signal(member, stack_file.STACK_SIGNAL)
                return pending
    return None


def _dump_text(pending: _PendingDump | None) -> str:
    if pending is None:
        return "\nno Python stacks: it is not Python, or has not begun to use Muster's library\n"
    if not pending.settled and pending.size <= pending.before:
        return f"\nno Python stacks within {_DUMP_TIMEOUT_S:g} s: see the states of its threads\n"
    return f"\n{pending.text()}"


def _kernel_lines(pid: int) -> Iterator[str]:
    """One line for each thread of a process and its descendants: the kernel's state of it."""
    for member in _process_and_descendants(pid):
        with suppress(OSError):
            yield f"process {member} ({_read_proc(member, 'comm')})\n"
            for thread in sorted(map(int, os.listdir(f"/proc/{member}/task")))[:_MAX_THREADS]:
                yield f"  thread {thread}: {_describe_thread(f'{member}/task/{thread}')}\n"


def _describe_thread(thread: str) -> str:
    state = next(
        (line for line in _read_proc(thread, "status").splitlines() if line.startswith("State:")), "State: gone"
    )
    words = [state.removeprefix("State:").strip()]
    if (where := _read_proc(thread, "wchan")) not in ("", "0"):
        words.append(f"waits in {where}")
    if (call := _read_proc(thread, "syscall").partition(" ")[0]).isdigit():
        words.append(f"system call {call}")
    return ", ".join(words)


def _read_proc(what: object, name: str) -> str:
    """A file of /proc; empty if it can't be read."""
    try:
        return Path(f"/proc/{what}/{name}").read_text().strip()
    except OSError:
        return ""


def _process_and_descendants(pid: int) -> list[int]:
    """A process and its descendants, nearest first."""
    found = [pid]
    for member in found:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{member}/task"):
                found += map(int, _read_proc(f"{member}/task/{thread}", "children").split())
        if len(found) >= _MAX_PROCESSES:
            break
    return found[:_MAX_PROCESSES]


class StackDumps:
    """Writes the stacks of this node's ranks into the gang's log folder, once per generation.

    generation: the newest generation whose stacks are done.
    places: where each of its ranks was, as far as its stacks show that.
    """

    def __init__(self, run_dir: str, gang: str) -> None:
        self._py_spy = find_py_spy()
        self._run_dir = run_dir
        self._gang = gang
        self._work = WorkerThreads(1)
        self._claimed_generation = 0
        self.generation = 0
        self.places: dict[int, HangPlace] = {}

    def claim(self, generation: int) -> bool:
        """Return True once per generation: the caller then writes its stacks."""
        fresh, self._claimed_generation = (
            generation > self._claimed_generation,
            max(generation, self._claimed_generation),
        )
        return fresh

    async def write(self, generation: int, pids: Mapping[int, int]) -> None:
        """Write the stacks of the ranks with these pids. An error is only logged."""
        names = {rank: rank_log_files.stacks_path("", "", generation, rank).name for rank in pids}
        texts: dict[str, str] = {}
        try:
            texts = await self._work(self._write, generation, {names[rank]: pid for rank, pid in pids.items()})
        except OSError as error:
            log.error("the stacks of generation %d can't be written: %s", generation, error)
        found = {rank: place_in(texts.get(name, "")) for rank, name in names.items()}
        self.places = {rank: place for rank, place in found.items() if place is not None}
        self.generation = max(generation, self.generation)

    def _write(self, generation: int, files: Mapping[str, int]) -> dict[str, str]:
        with rank_log_files.hold_log_folder(self._run_dir, self._gang, f"g{generation}") as folder:
            return write_stacks(folder, files, self._py_spy)

    def close(self) -> None:
        """Stop the thread."""
        self._work.close()


def find_py_spy() -> str:
    """The path of py-spy in this process's PATH; empty if it is not installed."""
    return shutil.which("py-spy") or ""


def native_stacks(py_spy: str, pids: Collection[int], until: float) -> dict[int, str]:
    """The stacks of each process, or why there are none. Blocks.

    Args:
        py_spy: the program.
        pids: all are read at the same time.
        until: the monotonic time by which the answer is needed, in seconds. py-spy is ended then.
    """
    running = {pid: _start([py_spy, "dump", "--native", "--pid", str(pid)]) for pid in pids}
    return {pid: _answer(process, until) for pid, process in running.items()}


def _start(command: list[str]) -> subprocess.Popen[bytes] | str:
    """The running process, or why it does not run."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return f"{command[0]} can't be run: {error.strerror}\n"


def _answer(process: subprocess.Popen[bytes] | str, until: float) -> str:
    if isinstance(process, str):
        return process
    with process:
        try:
            output, _ = process.communicate(timeout=max(_LEAST_NATIVE_WAIT_S, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return "py-spy needs longer than a fence waits\n"
    return output[:MAX_STACK_BYTES].decode(errors="replace")
