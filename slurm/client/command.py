"""The one door through which the client runs programs.

A program gets a deadline; when that passes, it and all it started are killed and `SlurmTimeout` is raised.
The event loop never waits on it. Its language is fixed to C, since Slurm's words are read. It dies with this process,
where `dies_with_us`: a call that Slurm gets to only later would be made in the name of a coordinator that another has
replaced.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable

_KILL_GRACE = 1.0
# By a program of its own: to set it between fork and exec, Python has to fork with all that gRPC runs.
_TIED = ("setpriv", "--pdeathsig", "KILL", "--")
NEEDED = "setpriv with --pdeathsig (util-linux 2.33)"
"""What `dies_with_us` takes."""
_dies_with_us: bool | None = None  # a fact about this machine, once it was tried


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


async def dies_with_us() -> bool:
    """Whether what is started here dies with this process: not where setpriv is missing or too old. Tried once."""
    global _dies_with_us
    if _dies_with_us is None:
        _dies_with_us = await _try(*_TIED, "true")
    return _dies_with_us


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
) -> Finished:
    """Runs `argv` to its end, for at most `deadline` s (SlurmTimeout). SlurmUnavailable if it can't start."""
    process = await start(argv, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL)
    try:
        out, err = await asyncio.wait_for(process.communicate(), deadline)
    except TimeoutError:
        raise SlurmTimeout(f"{argv[0]}: no answer within {deadline:g} s") from None
    finally:
        await kill(process)
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


async def start(
    argv: Sequence[str],
    *,
    stdin: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = 2**16,
) -> asyncio.subprocess.Process:
    """Starts `argv` in a process group of its own, output and errors piped. `limit`: its longest line."""
    environment = {**(os.environ if env is None else env), "LC_ALL": "C"}
    try:
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError("no such command")
        return await asyncio.create_subprocess_exec(
            *(_TIED if await dies_with_us() else ()),
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
    try:
        await asyncio.wait_for(process.wait(), _KILL_GRACE)
    except TimeoutError:
        pass  # in uninterruptible sleep: the kernel ends it when it can, nobody waits for that
