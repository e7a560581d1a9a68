"""The agent's own log: lines to stderr (srun's output, while srun lives) and to a file beside the ranks' logs.

Both may hang (a pipe that nobody reads any more, shared storage that is away), so each has a thread of its own behind a
bounded queue: the event loop never waits, lines are dropped instead.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from pathlib import Path

from muster.daemon.host import rank_log_files

_LINES = 10_000
_LAST_S = 1.0
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class _Behind(logging.Handler):
    """Hands records to another handler in a thread."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(_LINES)
        self._thread = threading.Thread(target=self._pump, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            pass

    def close(self) -> None:
        """Give what is queued a moment to be written."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        self._thread.join(_LAST_S)
        super().close()

    def _pump(self) -> None:
        while (record := self._queue.get()) is not None:
            self._handler.handle(record)


def path(run_dir: str, gang: str, node: str) -> Path:
    """The log of the gang's agent on `node`."""
    return rank_log_files.log_folder(run_dir, gang) / "agents" / f"{node}.log"


def start(level: str, run_dir: str, gang: str, node: str) -> None:
    """Begin to log. A run folder that can't be written is said on stderr, and fails the ranks later, with its
    reason.
    """
    file = path(run_dir, gang, node)
    formatter = logging.Formatter(_FORMAT, "%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    try:
        Path(run_dir, "logs").mkdir(exist_ok=True)  # the run folder itself must be there
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    except OSError as error:
        print(f"muster-agent: no log in the run folder: {error}", file=sys.stderr)
    for handler in handlers:
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(_Behind(handler))
    logging.getLogger().setLevel(level.upper())


def stop() -> None:
    """Write out what is queued, as far as that takes no longer than a moment."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()
