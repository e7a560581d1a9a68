"""What must hold of a process after each input: no bug was logged, and its memory has not grown much."""

from __future__ import annotations

import logging
import resource

MOST_GROWTH_KIB = 512 * 1024
"""KiB by which the process may grow in a run. It holds the servers, their callers, and the fuzzer's own inputs."""


class BugLog(logging.Handler):
    """Collects what only a bug of Muster logs: exceptions that nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: list[str] = []
        self._began_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the record if it has a traceback, or is gRPC's or asyncio's."""
        if record.exc_info or record.name.startswith(("grpc", "asyncio")):
            self._found.append(f"{record.getMessage()}\n{logging.Formatter().formatException(record.exc_info)}"
                               if record.exc_info else record.getMessage())  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError for a bug that was logged, and for memory."""
        found, self._found = self._found, []
        assert not found, found[0]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._began_kib
        assert grown < MOST_GROWTH_KIB, f"the process has grown by {grown} KiB"
