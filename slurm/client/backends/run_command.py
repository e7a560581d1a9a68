"""The only module of the Slurm client that runs programs.

A program has a deadline. At the deadline, the program and all its children are killed, and `SlurmTimeout` is raised.
The event loop never blocks on a program. The locale is set to C, because the client reads Slurm's messages.

If `can_limit_lifetime`, a program dies together with this process. Otherwise a late call could act in the name of a
coordinator that has been replaced. That is not enough if this process is frozen or hangs in the kernel. So a caller
with a leadership lease passes `lease_s`: a separate timer process then ends the program.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.slurm.client.deadline import BACKSTOP_DELAY_S
from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable

_KILL_GRACE_S = 1.0
"""Seconds to wait for a killed program. A process in uninterruptible sleep may need longer."""
_PIPE_BYTES = 2**20
"""No pipe holds more by default: 16 pages, of at most 64 KiB. One read empties it."""
_LAST_OUTPUT_S = 1.0
"""Seconds for which output is awaited once its program has ended: what it has written through a process of its own, as
bash's `exec > >(tee log)` makes one, comes later.
"""
# A separate program sets the parent-death signal: Python code between fork and exec is unsafe with gRPC's threads.
_SETPRIV, _TIMEOUT = (shutil.which(name) or name for name in ("setpriv", "timeout"))
LIFETIME_TOOLS = "setpriv with --pdeathsig (util-linux 2.33) and timeout (coreutils)"
"""The programs that `can_limit_lifetime` requires."""
_lifetime_can_be_limited: bool | None = None  # None until `can_limit_lifetime` has tested this host
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit statuses of a program that was killed, by `timeout` or by another process. Nobody knows what the program has
done.
"""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """The result of a program.

    `exit_status` is the exit status; if negative, the signal that ended the program. `stdout` and `stderr` are the
    whole output.
    """

    exit_status: int
    stdout: str
    stderr: str

    @property
    def error_text(self) -> str:
        """The program's error message on one line."""
        return (
            " ".join((self.stderr or self.stdout).split()) or f"exit status {self.exit_status} without an error message"
        )


async def can_limit_lifetime() -> bool:
    """Returns whether started programs end with this process, and after a given time.

    The answer is False if a program of `LIFETIME_TOOLS` is missing or too old. The test runs once for each process.
    """
    global _lifetime_can_be_limited
    if _lifetime_can_be_limited is None:
        _lifetime_can_be_limited = await _try(*_lifetime_limits(60.0), "true")
    return _lifetime_can_be_limited


def _lifetime_limits(seconds: float) -> tuple[str, ...]:
    """Returns the command prefix that ends a program with this process, and after `lease_s` seconds."""
    if math.isinf(seconds):
        return (_SETPRIV, "--pdeathsig", "KILL", "--")
    # `timeout` forwards SIGTERM to the program. A SIGTERM that comes before `timeout` knows the number of its child
    # ends `timeout` alone. So the program dies with `timeout` as well.
    ends_with = (_SETPRIV, "--pdeathsig")
    return (*ends_with, "TERM", "--", _TIMEOUT, "--signal=KILL", f"{seconds:.3f}", *ends_with, "KILL", "--")


async def _try(*argv: str) -> bool:
    """Returns whether the program starts and exits with 0."""
    nothing = asyncio.subprocess.DEVNULL
    try:
        tried = await asyncio.create_subprocess_exec(*argv, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:
        return False
    return await tried.wait() == 0


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    lease_s: float = math.inf,
) -> CompletedCommand:
    """Runs `argv` until it ends.

    Args:
        timeout_s: seconds after which the program is killed.
        lease_s: seconds left of the caller's leadership lease. The program is killed then as well. `BACKSTOP_DELAY_S`
            later a separate timer kills it, even if this process is frozen.

    Raises:
        SlurmTimeout: the program was killed.
        SlurmUnavailable: the program cannot be started.
    """
    longest = min(timeout_s, lease_s)
    process = await start(argv, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL, lease_s=lease_s + BACKSTOP_DELAY_S)
    try:
        async with asyncio.timeout(longest):
            out, err = await process.communicate()
    except TimeoutError:
        raise SlurmTimeout(f"{argv[0]}: no answer within {longest:g} s") from None
    finally:
        await kill(process)
    assert process.returncode is not None
    if process.returncode in _KILLED:
        raise SlurmTimeout(f"{argv[0]}: killed before it answered")
    return CompletedCommand(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


async def run_for_caller(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    given: bytes | None = None,
    on_line: Callable[[str], None] | None = None,
    on_error: Callable[[bytes], None] | None = None,
) -> int:
    """Runs a program in the place of whoever called this one: its errors go where ours go, it may take as long as it
    wants, and a Ctrl-C reaches it too. Returns its exit status once the program itself has ended, and its output: of
    processes that it has left behind and that hold the output open, `_LAST_OUTPUT_S` later.

    Args:
        env: its whole environment.
        given: its standard input. None: ours.
        on_line: takes each line of its output. None: the output goes where ours goes.
        on_error: takes its errors likewise, but as they come: a question to the user ends without a line's end.

    Raises:
        SlurmUnavailable: the program can't be started.
    """
    lines = _Lines(on_line) if on_line else None
    outputs = [_Output(take) if take else None for take in (lines, on_error)]
    out, err = (output.target if output else None for output in outputs)
    try:
        stdin = None if given is None else asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdin=stdin, stdout=out, stderr=err, env=dict(env))
    except OSError as error:
        for output in filter(None, outputs):
            output.close()
        raise SlurmUnavailable(f"{argv[0]} can't be started: {error.strerror or error}") from error
    ended = asyncio.ensure_future(process.wait())
    passing = [asyncio.ensure_future(output.pass_on(ended)) for output in outputs if output]
    if process.stdin and given is not None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has seen enough
            process.stdin.write(given)
            await process.stdin.drain()
        process.stdin.close()
    await asyncio.gather(*passing)
    if lines:
        lines.end()
    status = await ended
    return 128 - status if status < 0 else status


class _Output:
    """A pipe. What a program writes into its `target` is passed on to `take`, as it comes."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._source, self.target = os.pipe()  # asyncio's own would keep `wait` until the last writer has ended, too
        os.set_blocking(self._source, False)

    async def pass_on(self, ended: asyncio.Future[int]) -> None:
        """Passes on what is written, until nobody holds the pipe open any more, or `_LAST_OUTPUT_S` after the program
        has `ended`: it may have left behind a process that goes on for days."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        os.close(self.target)
        loop.add_reader(self._source, ready.set)
        late = asyncio.ensure_future(_awhile_after(ended))
        late.add_done_callback(lambda _: ready.set())
        try:
            is_last = False
            while not is_last:
                await ready.wait()
                ready.clear()
                is_last = late.done()  # asked before the read
                try:
                    chunk = os.read(self._source, _PIPE_BYTES)
                except BlockingIOError:
                    continue
                self._take(chunk)
                is_last |= not chunk
        finally:
            late.cancel()
            loop.remove_reader(self._source)
            os.close(self._source)

    def close(self) -> None:
        """No program has been started."""
        os.close(self._source)
        os.close(self.target)


async def _awhile_after(ended: asyncio.Future[int]) -> None:
    await asyncio.wait([ended])
    await asyncio.sleep(_LAST_OUTPUT_S)


class _Lines:
    """Divides what a program writes into lines, and hands each to `take`."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take, self._rest = take, b""

    def __call__(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(f"{line.decode(errors='replace')}\n")

    def end(self) -> None:
        """Hands over a last line without an end."""
        if self._rest:
            self._take(self._rest.decode(errors="replace"))


async def start(
    argv: Sequence[str],
    *,
    stdin: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = 2**16,
    lease_s: float = math.inf,
) -> asyncio.subprocess.Process:
    """Starts `argv` in its own process group. Its output and its errors are pipes.

    Args:
        limit: the longest line in bytes that the caller reads.
        lease_s: seconds after which the program ends, even if this process is frozen.

    Raises:
        SlurmUnavailable: the program cannot be started.
    """
    environment = {**(os.environ if env is None else env), "LC_ALL": "C"}
    try:
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError("no such command")
        return await asyncio.create_subprocess_exec(
            *(_lifetime_limits(lease_s) if await can_limit_lifetime() else ()),
            *argv,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            limit=limit,
        )
    except OSError as error:
        raise SlurmUnavailable(
            f"{argv[0]} can't be started: {error.strerror or error}. Are Slurm's commands installed on this host?"
        ) from error


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kills `process` and its process group, and waits until the process is reaped. Does nothing if it has ended."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the process has already ended
    # Not asyncio.timeout: in Python 3.11.2 it raises CancelledError inside an expired timeout.
    reaped = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([reaped], timeout=_KILL_GRACE_S)
    finally:
        reaped.cancel()  # the kernel ends a process in uninterruptible sleep later; do not wait for that
