"""A checkpoint library in a process of its own, as the benchmark sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import environments
from benchmarks.peers.checkpoints.environments import NotInstalled

_END_TIMEOUT_S = 5.0
_HERE = Path(__file__).resolve().parent


class NotMeasured(Exception):
    """A library can't be measured. The message says why."""


@dataclass(frozen=True)
class Library:
    """One library. `about`: what its figure is."""

    name: str
    environment: str
    requirements: tuple[str, ...]
    program: str
    about: str


LIBRARIES = (
    Library(
        "DLRover Flash Checkpoint",
        "dlrover",
        # It imports grpc and protobuf, and requires neither.
        ("dlrover[torch]==0.6.1", "grpcio", "protobuf"),
        "flash_checkpoint.py",
        "save to memory, with its saver's process beside it",
    ),
    Library(
        "NVRx local checkpoint",
        "nvrx",
        ("nvidia-resiliency-ext==0.4.1",),
        "local_checkpoint.py",
        "synchronous, to tmpfs: its asynchronous save needs CUDA",
    ),
)


class RunningLibrary:
    """A library's process. A context manager.

    Args:
        library: what to run.
        job: the descriptor of the memory with the state, the rows of a tensor, the threads, and folders on disk and
            in memory, as the programs name them.

    Raises:
        NotMeasured: it can't be installed.
    """

    def __init__(self, library: Library, job: dict[str, Any]) -> None:
        try:
            python = environments.python_of(library.environment, list(library.requirements))
        except NotInstalled as refused:
            raise NotMeasured(str(refused)) from refused
        self._process = subprocess.Popen(
            [python, _HERE / library.program, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[job["descriptor"]],
            env={**os.environ, "PYTHONPATH": ""},
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> RunningLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(NotMeasured):
            self.call_s("close")
        self._process.kill()
        self._process.wait()
        self._end_others()

    def _end_others(self) -> None:
        """End the library's own processes. Python's resource tracker ignores SIGTERM: it removes semaphores first."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _END_TIMEOUT_S
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)

    def call_s(self, name: str) -> float:
        """Seconds of one call.

        Raises:
            NotMeasured: it has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or '{"error": "its process has ended"}')
        except BrokenPipeError:
            raise NotMeasured("its process has ended") from None
        if "error" in answer:
            raise NotMeasured(answer["error"])
        return float(answer["seconds"])
