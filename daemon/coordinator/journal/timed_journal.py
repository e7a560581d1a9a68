"""How long the journal's writes take. A slow disk is named in the log, and its time is not held against any node.

Nothing else of the coordinator runs during a write: no message is read and no timer fires. So whoever judges silence
must know how long the writes took. A thread names a write that does not end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.host.lasting_problem import LastingProblem

SLOW_WRITE_S = 1.0
"""Seconds from which the log names a write. A commit takes milliseconds; verdicts are measured in seconds."""
CHECK_S = 2.0
"""Seconds between two looks at a write that does not end. A coordinator that shares its folder ends 5 s after its last
renewal of the lease, and the log shall have the reason by then."""
CALM_S = 60.0
"""Seconds without a slow write after which the disk counts as fast again."""
_log = logging.getLogger(__name__)


class WritableJournal(Protocol):
    """The journal that is measured (journal.Journal). `path`: its file."""

    path: Path

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]: ...
    def snapshot_if_due(self, state: DurableState) -> bool: ...


class TimedJournal:
    """Passes writes on to `journal` and measures them.

    `now`: a clock in seconds. Every `check_s` a thread looks at a write that is under way, from `start` to `stop`.
    """

    def __init__(self, journal: WritableJournal, now: Callable[[], float], check_s: float = CHECK_S) -> None:
        self._journal, self._now, self._check_s = journal, now, check_s
        self._under_way: object | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="journal-disk", daemon=True)
        self._slow = LastingProblem(_log, f"the disk of {journal.path.parent} is fast again", now)
        self._slow_at = float("-inf")
        self.total_s = 0.0
        """Seconds that all writes have taken."""

    def start(self) -> None:
        """Start to look at writes that do not end."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to look."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def append(self, decided: Sequence[facts.Fact], at: float, cause: str) -> list[Record]:
        """See Journal.append."""
        with self._measured():
            return self._journal.append(decided, at, cause)

    def snapshot_if_due(self, state: DurableState) -> bool:
        """See Journal.snapshot_if_due."""
        with self._measured():
            return self._journal.snapshot_if_due(state)

    def note_calm(self) -> None:
        """Log that a slow disk is fast again, if it has not been slow for `CALM_S`."""
        if self._slow.lasts and self._now() - self._slow_at > CALM_S:
            self._slow.end()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        began = self._now()
        self._under_way = object()
        try:
            yield
        finally:
            self._under_way = None
            took_s = self._now() - began
            self.total_s += took_s
            if took_s > SLOW_WRITE_S:
                self._slow_at = self._now()
                self._slow.meet(
                    f"the disk of {self._journal.path.parent} is slow: a write to {self._journal.path.name} took "
                    f"{took_s:.1f} s, and the coordinator did nothing else meanwhile. Find what else uses this disk, "
                    "or keep the state folder on a faster one"
                )

    def _watch(self) -> None:
        folder, seen = self._journal.path.parent, None
        stuck = LastingProblem(_log, f"the disk of {folder} answers again", self._now)
        while not self._stopping.wait(self._check_s):
            if seen is not None and seen is self._under_way:
                stuck.meet(
                    f"the disk of {folder} does not answer: a write to {self._journal.path.name} does not end, and the "
                    "coordinator does nothing until it ends. Find what holds this disk or its file server"
                )
            else:
                stuck.end()
            seen = self._under_way
