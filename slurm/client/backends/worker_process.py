"""Owns one pyslurm worker process: starts it when first needed, asks it, kills it when an answer is late.

A late answer costs its asker the deadline and nobody else anything: the next request gets a fresh process.
If the process dies over a request, whether that was carried out is not known, which is what `SlurmTimeout`
means.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

from muster.slurm.client.backends import run_command
from muster.slurm.client.deadline_budget import Budget
from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable
from muster.slurm.client.parsing import refusals
from muster.slurm.client.permit import OVERTIME_S, Permit, unopposed

PYSLURM_WORKER: Final = (sys.executable, "-m", "muster.slurm.client.backends.pyslurm_worker")
_LONGEST_LINE: Final = 2**24
_WORDS_KEPT: Final = 2000


class WorkerProcess:
    """One process, one request at a time; who comes second waits, within its own deadline."""

    def __init__(self, argv: Sequence[str] = PYSLURM_WORKER, permit: Permit = unopposed) -> None:
        """`permit` is asked before each request, and says how long that may take."""
        self._argv = argv
        self._permit = permit
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[None] | None = None
        self._said = ""
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process that serves now, None before the first request and after a kill."""
        return None if self._process is None else self._process.pid

    async def ask(self, what: str, deadline: float, op: str, **arguments: Any) -> list[Any]:
        """The records that `op` gives. Raises what Slurm's words mean when it refuses."""
        budget = Budget(deadline)
        try:
            async with asyncio.timeout(deadline), self._turn:
                return await self._ask(what, op, arguments)
        except TimeoutError:
            took = deadline - max(budget.left, 0)
            raise SlurmTimeout(f"{what}: no answer within {took:.1f} s") from None

    async def _ask(self, what: str, op: str, arguments: dict[str, Any]) -> list[Any]:
        done = False
        try:
            process = await self._running()
            assert process.stdin is not None
            within = self._permit()
            ends_s = 0.0 if math.isinf(within) else within + OVERTIME_S
            process.stdin.write(json.dumps([op, arguments, ends_s]).encode() + b"\n")
            async with asyncio.timeout(None if math.isinf(within) else within):
                records = await self._read(process, what)
            done = True
            return records
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SlurmTimeout(f"{what}: the pyslurm worker died: {self._said or error}") from error
        finally:
            # An answer that was not read to its end would be taken for that of the next request.
            if not done and not self._idle():
                await self._kill()

    async def _read(self, process: asyncio.subprocess.Process, what: str) -> list[Any]:
        """Reads lines of records up to the line that ends the answer."""
        assert process.stdout is not None
        records: list[Any] = []
        self._answered = False
        while True:
            line = await process.stdout.readline()
            if not line:
                await process.wait()
                raise SlurmTimeout(f"{what}: the pyslurm worker died: {await self._last_words()}")
            said = json.loads(line)
            if isinstance(said, list):
                records += said
                await asyncio.sleep(0)  # a long answer may be in the buffer already: others get their turn
                continue
            self._answered = True
            if "words" in said:
                raise refusals.failure(what, said["words"])
            return records

    def _idle(self) -> bool:
        """True if the process is there and has nothing left to say."""
        return self._process is not None and self._process.returncode is None and self._answered

    async def start(self, deadline: float) -> None:
        """Starts the process, so that no request waits for it. SlurmUnavailable if it can't."""
        try:
            async with asyncio.timeout(deadline), self._turn:
                await self._running()
        except TimeoutError:
            raise SlurmTimeout(f"start pyslurm: not there within {deadline:g} s") from None

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._kill()
        self._said = ""
        self._answered = False
        process = await run_command.start(self._argv, stdin=asyncio.subprocess.PIPE, limit=_LONGEST_LINE)
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._errors = asyncio.create_task(self._listen(process.stderr))
        try:
            ready = await process.stdout.readline()
        except asyncio.CancelledError:
            await self._kill()
            raise
        if not ready:
            words = await self._last_words()
            await self._kill()
            raise SlurmUnavailable(f"pyslurm does not start: {words}")
        return process

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        """Keeps the last words of the process, and its pipe from filling up."""
        while chunk := await stderr.read(4096):
            self._said = (self._said + chunk.decode(errors="replace"))[-_WORDS_KEPT:]

    async def _last_words(self) -> str:
        if self._errors is not None:
            await self._errors
        lines = [line for line in self._said.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    async def _kill(self) -> None:
        process, self._process = self._process, None  # it is asked nothing more, whatever becomes of it
        if process is None:
            return
        await run_command.kill(process)
        if self._errors is not None:
            self._errors.cancel()
        if process.stdin is not None:
            process.stdin.close()

    async def aclose(self) -> None:
        """Ends the process."""
        await self._kill()
