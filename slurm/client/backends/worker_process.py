"""Owns one pyslurm worker process: starts it on demand, sends requests, kills it if an answer is late.

A late answer costs only its own caller time: the next request gets a new process. If the process dies during a request,
nobody knows whether Slurm has executed the request. The caller then gets `SlurmTimeout`.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

from muster.slurm.client.backends import run_command
from muster.slurm.client.deadline import BACKSTOP_DELAY_S, Deadline, LeaseGuard, no_lease
from muster.slurm.client.errors import SlurmTimeout, SlurmUnavailable
from muster.slurm.client.parsing import error_messages

PYSLURM_WORKER: Final = (sys.executable, "-m", "muster.slurm.client.backends.pyslurm_worker")
_MAX_LINE_BYTES: Final = 2**24
_STDERR_TAIL_CHARS: Final = 2000


class WorkerProcess:
    """One process that serves one request at a time. A second caller waits, at most until its own deadline."""

    def __init__(self, argv: Sequence[str] = PYSLURM_WORKER, lease_guard: LeaseGuard = no_lease) -> None:
        """`lease_guard` is called before each request. It returns how many seconds the request may take."""
        self._argv = argv
        self._lease_guard = lease_guard
        self._process: asyncio.subprocess.Process | None = None
        self._stderr_reader: asyncio.Task[None] | None = None
        self._stderr_tail = ""
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The pid of the current process. None before the first request and after a kill."""
        return None if self._process is None else self._process.pid

    async def request(self, operation: str, timeout_s: float, method: str, **arguments: Any) -> list[Any]:
        """Sends the request `method` and returns its records.

        Args:
            operation: the request in words, for error messages.
            timeout_s: seconds for the whole call, with the wait for earlier requests.

        Raises:
            SlurmError: Slurm refused, or there was no answer in time.
        """
        deadline = Deadline(timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                return await self._ask(operation, method, arguments)
        except TimeoutError:
            took = timeout_s - max(deadline.remaining_s, 0)
            raise SlurmTimeout(f"{operation}: no answer within {took:.1f} s") from None

    async def _ask(self, operation: str, method: str, arguments: dict[str, Any]) -> list[Any]:
        done = False
        try:
            process = await self._running()
            assert process.stdin is not None
            lease_s = self._lease_guard()
            alarm_s = 0.0 if math.isinf(lease_s) else lease_s + BACKSTOP_DELAY_S
            process.stdin.write(json.dumps([method, arguments, alarm_s]).encode() + b"\n")
            async with asyncio.timeout(None if math.isinf(lease_s) else lease_s):
                records = await self._read(process, operation)
            done = True
            return records
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SlurmTimeout(f"{operation}: the pyslurm worker died: {self._stderr_tail or error}") from error
        finally:
            # The rest of an unread answer would be read as the answer to the next request.
            if not done and not self._idle():
                await self._kill()

    async def _read(self, process: asyncio.subprocess.Process, operation: str) -> list[Any]:
        """Reads lines of records up to the line that ends the answer."""
        assert process.stdout is not None
        records: list[Any] = []
        self._answered = False
        while True:
            line = await process.stdout.readline()
            if not line:
                await process.wait()
                raise SlurmTimeout(f"{operation}: the pyslurm worker died: {await self._last_stderr_line()}")
            message = json.loads(line)
            if isinstance(message, list):
                records += message
                await asyncio.sleep(0)  # a long answer may already be in the buffer: let other tasks run
                continue
            self._answered = True
            if "words" in message:
                raise error_messages.to_error(operation, message["words"])
            return records

    def _idle(self) -> bool:
        """Whether the process runs and has sent its whole answer."""
        return self._process is not None and self._process.returncode is None and self._answered

    async def start(self, timeout_s: float) -> None:
        """Starts the process now, so that the first request does not wait for the start.

        Raises:
            SlurmUnavailable: pyslurm cannot be loaded.
        """
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                await self._running()
        except TimeoutError:
            raise SlurmTimeout(f"start pyslurm: no worker process within {timeout_s:g} s") from None

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._kill()
        self._stderr_tail = ""
        self._answered = False
        process = await run_command.start(self._argv, stdin=asyncio.subprocess.PIPE, limit=_MAX_LINE_BYTES)
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))
        try:
            ready = await process.stdout.readline()
        except asyncio.CancelledError:
            await self._kill()
            raise
        if not ready:
            words = await self._last_stderr_line()
            await self._kill()
            raise SlurmUnavailable(f"pyslurm does not start: {words}")
        return process

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        """Keeps the end of the process's stderr, and prevents the pipe from filling up."""
        while chunk := await stderr.read(4096):
            self._stderr_tail = (self._stderr_tail + chunk.decode(errors="replace"))[-_STDERR_TAIL_CHARS:]

    async def _last_stderr_line(self) -> str:
        if self._stderr_reader is not None:
            await self._stderr_reader
        lines = [line for line in self._stderr_tail.splitlines() if line.strip()]
        return lines[-1] if lines else "it printed no error message"

    async def _kill(self) -> None:
        process, self._process = self._process, None  # even if the kill fails, this process gets no further request
        if process is None:
            return
        await run_command.kill(process)
        if self._stderr_reader is not None:
            self._stderr_reader.cancel()
        if process.stdin is not None:
            process.stdin.close()

    async def aclose(self) -> None:
        """Ends the process."""
        await self._kill()
