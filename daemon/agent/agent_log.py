"""The agent's own log: lines go to stderr (srun's output, while srun runs) and to a file beside the ranks' logs.

Both outputs may block: a pipe that nobody reads, shared storage that does not answer. So each output has its own thread
behind a bounded queue. The event loop never waits; when a queue is full, lines are dropped. While the file can't be
written (a full disk), its lines are lost, and stderr gets one line a minute that says so.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from io import FileIO, TextIOWrapper
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.host.plain_text import PlainFormatter
from muster.daemon.host.process import log_format

_QUEUE_LINES = 10_000
_DRAIN_S = 1.0
"""Seconds in which queued lines may still be written at the end."""


class _LogFile(logging.FileHandler):
    """A log file. A write that fails is a line on stderr, at most once a minute, not a traceback for each."""

    def __init__(self, file: Path, descriptor: int) -> None:
        """`descriptor`: the open file, whatever has its name."""
        self._descriptor = descriptor
        super().__init__(file)
        self._failed = False
        self._failing = LastingProblem(_stderr_log(), f"the log {file} can be written again")

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(
            FileIO(self._descriptor, "a"), encoding=self.encoding, errors=self.errors, write_through=True
        )

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        if not self._failed:
            self._failing.end()

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed = True
        self._failing.meet(f"can't write the log {self.baseFilename}: {sys.exc_info()[1]}. Lines are lost")


def _stderr_log() -> logging.Logger:
    """A logger that writes to stderr and never to the log file itself."""
    logger = logging.Logger("muster.agent_log", logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter())
    logger.addHandler(handler)
    return logger


class _QueuedHandler(logging.Handler):
    """Passes records to another handler in a thread."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUE_LINES)
        self._thread = threading.Thread(target=self._write_records, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            pass

    def close(self) -> None:
        """Write what is queued, for at most `_DRAIN_S` seconds."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        self._thread.join(_DRAIN_S)
        super().close()

    def _write_records(self) -> None:
        while (record := self._queue.get()) is not None:
            self._handler.handle(record)


def path(run_dir: str, gang: str, node: str) -> Path:
    """The log file of the gang's agent on `node`."""
    return rank_log_files.log_folder(run_dir, gang) / rank_log_files.AGENTS / f"{node}.log"


def start(level: str, form: str, run_dir: str, gang: str, node: str, job: str, *, for_script: bool = False) -> None:
    """Start logging as `form` says (log_format; an agent does not write to journald itself). `for_script`: stderr
    belongs to a user's own script, and gets errors only.

    If the run folder can't be written to, print the reason on stderr; the ranks fail later with the same reason.
    """
    file = path(run_dir, gang, node)
    log_format.about_all.update(node=node, job=job, gang=gang)
    stderr = logging.StreamHandler(sys.stderr)
    # srun mixes the lines of all agents in one file.
    stderr.setFormatter(log_format.formatter(form, node))
    if for_script:
        stderr.setLevel(logging.ERROR)
    handlers: list[logging.Handler] = [stderr]
    try:
        with rank_log_files.hold_log_folder(run_dir, gang, file.parent.name) as folder:
            handlers.append(own := _LogFile(file, folder.append(file.name)))
            own.setFormatter(log_format.formatter(form))
            rank_log_files.note_job(folder, job)
    except OSError as error:
        print(f"muster-agent: no log in the run folder: {error}", file=sys.stderr)
    for handler in handlers:
        logging.getLogger().addHandler(_QueuedHandler(handler))
    logging.getLogger().setLevel(level.upper())


def stop() -> None:
    """Write what is queued, for at most `_DRAIN_S` seconds per output, and stop logging."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()
