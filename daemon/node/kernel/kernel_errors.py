"""From records of the kernel log to errors, each of them once: drivers print one fault several times.

The node daemon reads its kernel log with this, and `muster policy replay` a saved one.
"""

from __future__ import annotations

from muster.daemon.node.kernel.driver_lines import DriverLines
from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord
from muster.daemon.node.kernel.xid import KernelErrorParser

REPEAT_S = 1.0
"""Seconds within which an equal error is a repetition."""
MAX_RECENT = 1000
"""Errors that are remembered at most. A node has fewer devices; a log that names more of them is a storm."""


class RecentErrors:
    """The errors of the last REPEAT_S seconds, so that each is reported once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], float] = {}

    def is_new(self, error: KernelError, now: float) -> bool:
        """Whether this is no repetition. `now`: seconds of a clock that does not step back."""
        while self._seen and (now - (oldest := next(iter(self._seen.values()))) >= REPEAT_S or now < oldest):
            del self._seen[next(iter(self._seen))]
        key = (error.kind, error.code, error.device)
        if key in self._seen:
            return False
        if len(self._seen) >= MAX_RECENT:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = now
        return True


class KernelErrors:
    """Reads record after record. `lines`: counts what was not understood."""

    def __init__(self, lines: DriverLines | None = None) -> None:
        self._parser, self._recent = KernelErrorParser(), RecentErrors()
        self.lines = lines or DriverLines()

    @property
    def not_understood(self) -> int:
        """Messages of errors of NVIDIA's driver that could not be read."""
        return self._parser.not_understood

    def read(self, record: KernelRecord, now: float) -> tuple[KernelError | None, str]:
        """The error of which the record tells; None if it tells of none, or repeats one. And what of it is to be
        shown (`DriverLines.note`). `now`: as in `is_new`."""
        error = self._parser.parse(record)
        line = "" if error is False else self.lines.note(record, error is not None, now)
        return error if error and self._recent.is_new(error, now) else None, line
