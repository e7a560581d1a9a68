"""srun, and the nodes on which it could start nothing.

A node may die between the moment in which Slurm gives it to a job and the launch of the step. srun finds no slurmd
there, says so, and takes the whole step down. The other nodes are as good as before: they are tried without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

_FAILED = re.compile(rb"Task launch for \S+ failed on node ([^\s:]+)")
_CHUNK = 65536
_LAST_WORDS_S = 2.0
"""srun has ended: what it still had to say is read for so long. A child of it may keep the pipe open."""
REQUEUE_TIMEOUT_S = 60.0
MAX_REQUEUES = 5
"""A job whose launch fails is requeued so often."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave: `job`, with `nodes` of which the gang needs `needed`, `host` among them. `requeue`: the job may
    be requeued; it was `restarts` times."""

    job: int = 0
    nodes: int = 0
    needed: int = 0
    requeue: bool = False
    host: str = ""
    restarts: int = 0
    scontrol: str = "scontrol"

    def command(self, srun: Sequence[str], lost: Sequence[str]) -> list[str]:
        """srun's command line for all nodes but `lost`."""
        if not lost:
            return list(srun)
        left = self.nodes - len(lost)
        return [srun[0], f"--nodes={left}", f"--ntasks={left}", f"--exclude={','.join(lost)}", *srun[1:]]


@dataclass(slots=True)
class Srun:
    """One srun under way; what it says on standard error is passed on."""

    process: asyncio.subprocess.Process
    failed: set[str] = field(default_factory=set)
    """Nodes on which it could start nothing."""
    _reader: asyncio.Task[None] | None = None

    @staticmethod
    async def start(argv: Sequence[str]) -> Srun:
        """Start it.

        Raises:
            OSError: there is none.
        """
        # A pipe of our own: with asyncio's, the end of srun would be known only once its last child has closed it.
        ours, theirs = os.pipe()
        try:
            srun = Srun(await asyncio.create_subprocess_exec(*argv, stderr=theirs))
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        srun._reader = asyncio.create_task(srun._read(ours))
        return srun

    async def wait(self) -> int:
        """Its exit status, once it has ended and said all."""
        status = await self.process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=_LAST_WORDS_S)
            self._reader.cancel()
        return status

    async def ends(self, within: float) -> bool:
        """Wait `within` seconds at most for its end; whether it has come."""
        return await _ends(self.process, within)

    async def _read(self, ours: int) -> None:
        said = asyncio.StreamReader()
        with os.fdopen(ours, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(said), pipe
            )
            try:
                await self._pass_on(said)
            finally:
                transport.close()

    async def _pass_on(self, said: asyncio.StreamReader) -> None:
        begun = b""
        while words := await said.read(_CHUNK):
            with contextlib.suppress(OSError):  # a full disk must not stop srun, which waits for its reader
                sys.stderr.buffer.write(words)
                sys.stderr.buffer.flush()
            *lines, begun = (begun + words).split(b"\n")
            begun = begun[-_CHUNK:]
            for line in lines:
                self.failed.update(name.decode(errors="replace") for name in _FAILED.findall(line))


async def _ends(process: asyncio.subprocess.Process, within: float) -> bool:
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([ended], timeout=within)
        return ended.done()
    finally:
        ended.cancel()


async def requeue(given: Allocation, within: float = REQUEUE_TIMEOUT_S) -> str:
    """Have Slurm put the job back into the queue, `within` seconds; Slurm's words where it refuses."""
    argv = (given.scontrol, "requeue", str(given.job))
    try:
        asked = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    except OSError as error:
        return f"scontrol: {error}"
    try:
        async with asyncio.timeout(within):
            _, words = await asked.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            asked.kill()
        await _ends(asked, _LAST_WORDS_S)
        return f"scontrol: no answer within {within:g} s"
    return words.decode(errors="replace").strip() if asked.returncode else ""
