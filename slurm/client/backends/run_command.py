"""The one door through which the client runs programs.

A program gets a deadline; when that passes, it and all it started are killed and `SlurmTimeout` is raised.
The event loop never waits on it. Its language is fixed to C, since Slurm's words are read. It dies with this process,
where `can_end`: a call that Slurm gets to only later would be made in the name of a coordinator that another has
replaced. That does not help where this process hangs in the kernel or is frozen: so whoever may be replaced has a timer
ring for each call (`within`), in a process that has nothing else to do.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable
from muster.slurm.client.permit import OVERTIME_S

_KILL_GRACE = 1.0
# By a program of its own: to set it between fork and exec, Python has to fork with all that gRPC runs.
_SETPRIV, _TIMEOUT = (shutil.which(name) or name for name in ("setpriv", "timeout"))
NEEDED = "setpriv with --pdeathsig (util-linux 2.33) and timeout (coreutils)"
"""What `can_end` takes."""
_can_end: bool | None = None  # a fact about this machine, once it was tried
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""By `timeout`, or by whoever else: what it did is not known."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended: its exit status (negative: the signal that ended it) and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it said about a failure, on one line."""
        return " ".join((self.err or self.out).split()) or f"exit status {self.status} without a word"


async def can_end() -> bool:
    """Whether what is started here ends with this process, and in time: not where a program is missing or too old for
    that. Tried once."""
    global _can_end
    if _can_end is None:
        _can_end = await _try(*_ended_within(60.0), "true")
    return _can_end


def _ended_within(seconds: float) -> tuple[str, ...]:
    """What a program is started by so that it ends with this process, and after so many seconds."""
    if math.isinf(seconds):
        return (_SETPRIV, "--pdeathsig", "KILL", "--")
    # timeout hands SIGTERM on, and is still there to kill what does not end by it.
    return (_SETPRIV, "--pdeathsig", "TERM", "--", _TIMEOUT, "--signal=KILL", f"{seconds:.3f}")


async def _try(*argv: str) -> bool:
    """Whether the program can be started, and ends well."""
    nothing = asyncio.subprocess.DEVNULL
    try:
        tried = await asyncio.create_subprocess_exec(*argv, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:
        return False
    return await tried.wait() == 0


async def run(
    argv: Sequence[str],
    *,
    deadline: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    within: float = math.inf,
) -> Finished:
    """Runs `argv` to its end, for `deadline` and `within` s at most (SlurmTimeout). SlurmUnavailable if it can't start.

    A little after `within` it is ended whatever has become of this process.
    """
    longest = min(deadline, within)
    process = await start(argv, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL, within=within + OVERTIME_S)
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
    return Finished(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


async def start(
    argv: Sequence[str],
    *,
    stdin: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = 2**16,
    within: float = math.inf,
) -> asyncio.subprocess.Process:
    """Starts `argv` in a process group of its own, output and errors piped. `limit`: its longest line; `within`: it
    ends after so many seconds, whatever has become of this process."""
    environment = {**(os.environ if env is None else env), "LC_ALL": "C"}
    try:
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError("no such command")
        return await asyncio.create_subprocess_exec(
            *(_ended_within(within) if await can_end() else ()),
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
            f"{argv[0]} can't be started: {error.strerror or error}. Are Slurm's commands installed here?"
        ) from error


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kills `process` and its group if it still runs, and waits until it is reaped. Twice is no error."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself meanwhile
    # Not asyncio.timeout: within a timeout that has passed, Python 3.11.2's raises CancelledError.
    reaped = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([reaped], timeout=_KILL_GRACE)
    finally:
        reaped.cancel()  # in uninterruptible sleep the kernel ends it when it can, nobody waits for that
